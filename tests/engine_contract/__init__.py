"""Tests of what a replica may rely on with any engine. They use EnginePort alone, with the bundled model."""
