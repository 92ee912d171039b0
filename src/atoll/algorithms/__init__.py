"""How clients train and the server moves: one small file each."""
