"""Simulates a backend with the service's own limits. Of a replica, only the time that requests take is modelled."""
