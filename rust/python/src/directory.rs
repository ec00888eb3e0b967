//! `pegaflow._native.Directory` and what it answers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pegaflow_engine::{Error, ErrorKind};
use pegaflow_peers::directory::{self, Answer, DirectoryTuning, PoolInventory, block_hash, namespace_seed};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::error::{Engine, Result};
use crate::items::collect;
use crate::keys::keys;
use crate::namespace::Namespace;
use crate::pool::Pool;

/// Who has what, in a Redis or Valkey.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct Directory {
    directory: Mutex<Option<Arc<directory::Directory>>>,
    pool: Arc<pegaflow_engine::Pool>,
    #[pyo3(get)]
    url: String,
}

impl Directory {
    fn slot(&self) -> MutexGuard<'_, Option<Arc<directory::Directory>>> {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self) -> Result<Arc<directory::Directory>> {
        // In a forked child there are no threads that could answer.
        self.pool.member()?;
        let closed = || Error::new(ErrorKind::Closed, "this directory was closed: make another one");
        Ok(Arc::clone(self.slot().as_ref().ok_or_else(closed)?))
    }
}

#[pymethods]
impl Directory {
    #[new]
    #[pyo3(signature = (pool, url, *, address=None))]
    fn new(py: Python<'_>, pool: &Bound<'_, Pool>, url: &str, address: Option<&str>) -> Result<Self> {
        let pool = pool.get().get()?;
        let directory = py.engine(|| {
            let inventory = Arc::new(PoolInventory::new(Arc::clone(&pool)));
            let directory = directory::Directory::open(inventory, url, DirectoryTuning::default())?;
            directory.announce(address).map(|()| directory)
        })?;
        Ok(Self { url: directory.url(), directory: Mutex::new(Some(Arc::new(directory))), pool })
    }

    #[pyo3(signature = (address))]
    fn announce(&self, py: Python<'_>, address: Option<&str>) -> Result<()> {
        let directory = self.get()?;
        py.engine(|| directory.announce(address))
    }

    fn find(&self, questions: &Bound<'_, PyAny>) -> Result<Option<DirectoryQuery>> {
        let directory = self.get()?;
        let questions = collect(questions, "questions", |_, question| {
            let (namespace, names) = question.extract::<(Bound<'_, Namespace>, Bound<'_, PyAny>)>()?;
            let (fingerprint, group) = self.pool.namespace_name(namespace.get().engine())?;
            let seed = namespace_seed(&fingerprint, group);
            Ok(keys(&names)?.iter().map(|key| block_hash(seed, &key.to_bytes())).collect::<Vec<u64>>())
        })?;
        Ok(directory.find(questions).map(|query| DirectoryQuery { query, answer: Mutex::default() }))
    }

    fn hosts(&self) -> Result<Vec<String>> {
        Ok(self.get()?.hosts().iter().map(ToString::to_string).collect())
    }

    fn facts<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let directory = self.get()?;
        let (asker, facts) = (directory.asker_facts(), PyDict::new(py));
        facts.set_item("up", asker.up)?;
        facts.set_item("problem", asker.problem)?;
        for (name, value) in [
            ("answered", asker.answered),
            ("finds", asker.finds),
            ("find_keys", asker.keys),
            ("keys_named", asker.named),
            ("finds_failed", asker.failed),
            ("finds_skipped", asker.skipped),
        ] {
            facts.set_item(name, value)?;
        }
        let Some(owner) = directory.owner_facts() else {
            facts.set_item("owner", py.None())?;
            return Ok(facts);
        };
        let own = PyDict::new(py);
        own.set_item("up", owner.up)?;
        own.set_item("problem", owner.problem)?;
        own.set_item("complete", owner.complete)?;
        for (name, value) in [
            ("number", u64::from(owner.number)),
            ("blocks", owner.blocks),
            ("registered_anew", owner.anew),
            ("blocks_written", owner.written),
            ("blocks_removed", owner.removed),
            ("entries_repaired", owner.repaired),
        ] {
            own.set_item(name, value)?;
        }
        facts.set_item("owner", own)?;
        Ok(facts)
    }

    fn close(&self, py: Python<'_>) {
        let directory = self.slot().take();
        // The threads are waited for, at most as long as a server takes to answer.
        py.detach(|| drop(directory));
    }
}

/// A question to the directory.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct DirectoryQuery {
    query: directory::DirectoryQuery,
    answer: Mutex<Option<Answer>>,
}

impl DirectoryQuery {
    /// The answer as soon as it is there, however often it is asked for.
    fn with<T>(&self, convert: impl FnOnce(&Answer) -> Result<T>) -> Result<Option<T>> {
        let mut answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        if answer.is_none() {
            *answer = self.query.poll();
        }
        answer.as_ref().map(convert).transpose()
    }
}

#[pymethods]
impl DirectoryQuery {
    fn poll<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyList>>> {
        self.with(|answer| {
            let addresses: Vec<_> = answer.addresses.iter().map(|address| PyString::new(py, address)).collect();
            let questions = PyList::empty(py);
            for owners_of_keys in &answer.owners {
                let answers = PyList::empty(py);
                for owners in owners_of_keys {
                    answers.append(PyList::new(py, owners.iter().map(|owner| &addresses[usize::from(*owner)]))?)?;
                }
                questions.append(answers)?;
            }
            Ok(questions)
        })
    }

    fn best(&self, count_max: usize) -> Result<Option<Vec<String>>> {
        self.with(|answer| Ok(answer.best(count_max).iter().map(|address| (**address).to_owned()).collect()))
    }
}
