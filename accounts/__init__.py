"""Predict, measure and draw the costs of a layout: bytes sent, bytes kept, seconds. parallel/ never imports this."""
