//! What Python has of a pool's SSD tier: `pegaflow._native.Prefetch`, and conversions for the methods of `Pool` and
//! `Namespace`.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pegaflow_engine::ssd::{Backend, StoreOptions};
use pegaflow_engine::tier::{self, Admission, Tier, TierFacts, TierOptions, TierState};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Engine, NativeError, Result};

/// A request to the SSD tier.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct Prefetch {
    request: Mutex<Option<tier::Prefetch>>,
    #[pyo3(get)]
    keys: usize,
}

impl Prefetch {
    pub(crate) fn new(request: tier::Prefetch) -> Self {
        let keys = request.keys();
        Self { request: Mutex::new(Some(request)), keys }
    }

    fn request(&self) -> MutexGuard<'_, Option<tier::Prefetch>> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Prefetch {
    fn poll(&self, py: Python<'_>) -> Option<usize> {
        py.detach(|| self.request().as_ref().map_or(Some(0), tier::Prefetch::poll))
    }

    fn found(&self, py: Python<'_>) -> usize {
        py.detach(|| self.request().as_ref().map_or(0, tier::Prefetch::found))
    }

    fn close(&self, py: Python<'_>) -> Result<()> {
        py.engine(|| {
            let request = self.request().take();
            drop(request);
            pegaflow_engine::Result::Ok(())
        })
    }
}

/// Options from the keywords of `Pool.serve_ssd`.
pub(crate) fn options(
    directories: Vec<PathBuf>,
    capacity_bytes: u64,
    admission: &str,
    write_bytes_per_second_max: u64,
    depths: (u16, u16),
    backend: &str,
) -> Result<TierOptions> {
    let admission = match admission {
        "second_touch" => Admission::SecondTouch,
        "all" => Admission::All,
        other => {
            let text = format!("'{other}' is no admission: use 'second_touch' or 'all'");
            return Err(NativeError::invalid(text));
        }
    };
    let backend = match backend {
        "auto" => Backend::Auto,
        "uring" => Backend::Uring,
        "threads" => Backend::Threads,
        other => {
            let text = format!("'{other}' is no way to do I/O: use 'auto', 'uring' or 'threads'");
            return Err(NativeError::invalid(text));
        }
    };
    let (read_depth, write_depth) = depths;
    let store = StoreOptions {
        directories,
        capacity_bytes: Some(capacity_bytes),
        read_depth,
        write_depth,
        backend,
        ..StoreOptions::default()
    };
    Ok(TierOptions { store, admission, write_bytes_per_second_max })
}

/// Facts of a tier as a dict.
pub(crate) fn facts<'py>(py: Python<'py>, facts: TierFacts) -> Result<Bound<'py, PyDict>> {
    let state = match facts.state {
        TierState::None => "none",
        TierState::Recovering => "recovering",
        TierState::Serving => "serving",
        TierState::Off => "off",
    };
    let dict = PyDict::new(py);
    dict.set_item("state", state)?;
    dict.set_item("leads", facts.leads)?;
    dict.set_item("problem", facts.problem)?;
    for (name, number) in facts.numbers {
        dict.set_item(name, number)?;
    }
    Ok(dict)
}

/// The number that `Namespace.tiers` has for a tier.
pub(crate) fn number(tier: Tier) -> u8 {
    match tier {
        Tier::Absent => 0,
        Tier::Memory => 1,
        Tier::Ssd => 2,
    }
}
