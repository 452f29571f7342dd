"""Predictions held against schedules that this project executes."""
