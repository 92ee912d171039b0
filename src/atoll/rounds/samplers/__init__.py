"""How clients are picked."""
