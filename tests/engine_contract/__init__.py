"""What a replica may rely on, whichever engine it has: tests against EnginePort alone, with the bundled model."""
