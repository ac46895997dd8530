"""What Headrace says of itself: metrics, log lines and traces. `names` lists all of them."""
