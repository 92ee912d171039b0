"""The client's side of a federation; imports no database and no web server."""
