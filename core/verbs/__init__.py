"""One function a verb: what the command line calls and what `import rbtool` offers, on top of all of core."""
