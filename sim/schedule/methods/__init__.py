"""The schedules that ship, one file a method."""
