//! How long tests wait for what comes about by itself.

use std::time::Duration;

/// Whatever is waited for comes long before, also on a machine that is twenty times as slow or has no processor for a
/// while: only what never comes takes so long.
pub const PATIENCE: Duration = Duration::from_secs(120);
