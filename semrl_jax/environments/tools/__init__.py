"""Tools: functions that a policy calls, the forms of its calls, and two tools with resources."""
