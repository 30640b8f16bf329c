"""Tables whose rows live in host memory: hot rows, staging of cold rows, and their schedules."""
