"""An app for Flower's deployment engine that trains nothing: clients send back what they are sent."""
