"""Engines that run as servers: what is the same whichever engine it is. A plugin adds its commands and routes."""
