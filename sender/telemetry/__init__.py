"""Observers: what a run tells the outside, each made from the one catalogue of events."""
