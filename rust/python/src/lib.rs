//! Python binding of the PegaFlow engine.
