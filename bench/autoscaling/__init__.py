"""Days of traffic on a simulated cluster, under the service's own scaling rule and under others."""
