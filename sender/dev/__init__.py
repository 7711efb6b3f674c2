"""What the demo and the tests need and a sending pod does not."""
