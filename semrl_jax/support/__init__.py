"""What every room uses: console, files, errors, imports, threads. It imports no room."""
