"""What a person sees: the terminal and the HTML page."""
