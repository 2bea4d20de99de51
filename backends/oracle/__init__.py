"""The independent reference, and how far rounding moves right answers. No stack takes part."""
