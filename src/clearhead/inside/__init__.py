"""Looking inside: functions that return data about a model. Drawing and printing are done elsewhere."""
