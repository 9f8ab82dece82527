"""What `bench/front_door.py` and the soak of streams start and measure."""
