"""What a message costs, against a floor measured in the same run. Start with `python -m bench`."""
