"""What a run says of itself: logbook, sinks, report."""
