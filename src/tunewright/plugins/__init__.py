"""Device names: one plugin for each kind of device string. `find` maps a string to its plugin."""
