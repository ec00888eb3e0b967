//! Blocks of other hosts: `pegaflow._native.PeerServer`, `Peers`, `PeerQuery`, `PeerFetch` and `Nic`.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use pegaflow_engine::{Error, ErrorKind, Key};
use pegaflow_peers::rdma;
use pegaflow_peers::transport::TransportKind;
use pegaflow_peers::{Credentials, PeersOptions, Question, ServerOptions, TlsFiles, network};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::error::{Engine, NativeError, Result};
use crate::keys;
use crate::namespace::Namespace;
use crate::pool::Pool;

/// What Python may close while another thread uses it.
struct Closable<T>(RwLock<Option<Arc<T>>>);

impl<T> Closable<T> {
    fn new(value: T) -> Self {
        Self(RwLock::new(Some(Arc::new(value))))
    }

    fn get(&self, what: &str) -> Result<Arc<T>> {
        let value = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let closed = || Error::new(ErrorKind::Closed, format!("{what} was closed: make another one"));
        Ok(Arc::clone(value.as_ref().ok_or_else(closed)?))
    }

    fn opened(&self) -> Option<Arc<T>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn close(&self) {
        let value = self.0.write().unwrap_or_else(PoisonError::into_inner).take();
        // Outside of the lock: the last one stops threads.
        drop(value);
    }
}

/// One port of an RDMA device.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct Nic(rdma::Nic);

#[pymethods]
impl Nic {
    #[new]
    fn new(device: String, port: u8, gid_index: u8, mtu_bytes: u32, node: Option<u32>) -> Self {
        Self(rdma::Nic { device, port, gid_index, mtu_bytes, node })
    }
}

fn ports(nics: Option<Vec<Bound<'_, Nic>>>) -> Vec<rdma::Nic> {
    nics.unwrap_or_default().iter().map(|nic| nic.get().0.clone()).collect()
}

fn credentials(token: Option<&str>, tls: Option<(PathBuf, PathBuf, PathBuf)>) -> Result<Credentials> {
    let files = tls.map(|(certificate, key, ca)| TlsFiles { certificate, key, ca });
    Ok(Credentials::new(token, files)?)
}

/// Answers for a pool when nobody else does.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct PeerServer(Closable<pegaflow_peers::PeerServer>);

#[pymethods]
impl PeerServer {
    #[new]
    #[pyo3(signature = (pool, listen, *, token=None, tls=None, nics=None))]
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        listen: String,
        token: Option<&str>,
        tls: Option<(PathBuf, PathBuf, PathBuf)>,
        nics: Option<Vec<Bound<'_, Nic>>>,
    ) -> Result<Self> {
        let (pool, nics, credentials) = (pool.get().get()?, ports(nics), credentials(token, tls)?);
        let server = py.engine(|| {
            let regions = network::regions(&pool, &nics);
            let options = ServerOptions { listen, credentials, data: Some(network::data_starter()), regions };
            pegaflow_peers::PeerServer::start(pool, options)
        })?;
        Ok(Self(Closable::new(server)))
    }

    fn facts<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let server = self.0.get("this server of peers")?;
        let facts = py.detach(|| server.facts());
        let dict = PyDict::new(py);
        dict.set_item("serving", facts.address.is_some())?;
        dict.set_item("address", facts.address.map(|address| address.to_string()))?;
        dict.set_item("problem", facts.problem)?;
        dict.set_item("sessions", facts.sessions)?;
        dict.set_item("leases", facts.leases)?;
        dict.set_item("leased_bytes", facts.leased_bytes)?;
        for (name, number) in facts.numbers {
            dict.set_item(name, number)?;
        }
        Ok(dict)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// This process's connections to other hosts' pools.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct Peers(Closable<pegaflow_peers::Peers>);

#[pymethods]
impl Peers {
    #[new]
    #[pyo3(signature = (pool, addresses, *, token=None, tls=None, nics=None, qps_per_peer=2))]
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        addresses: Vec<String>,
        token: Option<&str>,
        tls: Option<(PathBuf, PathBuf, PathBuf)>,
        nics: Option<Vec<Bound<'_, Nic>>>,
        qps_per_peer: usize,
    ) -> Result<Self> {
        let (pool, nics, credentials) = (pool.get().get()?, ports(nics), credentials(token, tls)?);
        let peers = py.engine(|| {
            let transports = network::transports(&pool, &nics, qps_per_peer);
            pegaflow_peers::Peers::start(pool, PeersOptions { addresses, credentials, transports })
        })?;
        Ok(Self(Closable::new(peers)))
    }

    fn set_addresses(&self, py: Python<'_>, addresses: Vec<String>) -> Result<()> {
        let peers = self.0.get("this client of peers")?;
        py.engine(|| peers.set_addresses(&addresses))
    }

    #[pyo3(signature = (questions, *, among=None))]
    fn find(
        &self,
        py: Python<'_>,
        questions: &Bound<'_, PyAny>,
        among: Option<Vec<String>>,
    ) -> Result<Option<PeerQuery>> {
        let peers = self.0.get("this client of peers")?;
        let mut asked = Vec::new();
        for question in questions.try_iter()? {
            let (namespace, keys, chained): (Bound<'_, Namespace>, Bound<'_, PyAny>, bool) = question?.extract()?;
            asked.push(Question { namespace: namespace.get().engine(), keys: keys::keys(&keys)?, chained });
        }
        let query = py.engine(|| match &among {
            Some(addresses) => peers.find_among(asked, addresses),
            None => peers.find(asked),
        })?;
        Ok(query.map(|query| PeerQuery(Closable::new(query))))
    }

    fn facts<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyList>> {
        let peers = self.0.get("this client of peers")?;
        let list = PyList::empty(py);
        for facts in py.detach(|| peers.facts()) {
            let dict = PyDict::new(py);
            dict.set_item("address", facts.address)?;
            dict.set_item("state", facts.state)?;
            dict.set_item("problem", facts.problem)?;
            let transport = facts.transport.map(|kind| match kind {
                TransportKind::Tcp => "tcp",
                TransportKind::Rdma => "rdma",
            });
            dict.set_item("transport", transport)?;
            dict.set_item("rtt_us", facts.rtt_us)?;
            dict.set_item("bytes_per_second", facts.bytes_per_second)?;
            dict.set_item("queued_bytes", facts.queued_bytes)?;
            for (name, number) in facts.numbers {
                dict.set_item(name, number)?;
            }
            list.append(dict)?;
        }
        Ok(list)
    }

    fn read_seconds(&self, block_bytes: u64) -> Result<Option<f64>> {
        Ok(self.0.get("this client of peers")?.read_seconds(block_bytes))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// What was asked of all peers.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct PeerQuery(Closable<pegaflow_peers::PeerQuery>);

#[pymethods]
impl PeerQuery {
    fn poll<'py>(&self, py: Python<'py>) -> Result<Option<Vec<Bound<'py, PyBytes>>>> {
        let query = self.0.get("this question to peers")?;
        let answers = py.detach(|| query.poll());
        Ok(answers.map(|answers| answers.iter().map(|tiers| PyBytes::new(py, tiers)).collect()))
    }

    #[pyo3(signature = (question, start, stop, *, parent=None))]
    fn fetch(
        &self,
        py: Python<'_>,
        question: usize,
        start: usize,
        stop: usize,
        parent: Option<&[u8]>,
    ) -> Result<Option<PeerFetch>> {
        let query = self.0.get("this question to peers")?;
        let parent = parent.map(Key::new).transpose()?;
        let fetch = py.engine(|| query.fetch(question, start..stop, parent))?;
        Ok(fetch.map(|fetch| PeerFetch { keys: fetch.keys(), fetch: Closable::new(fetch) }))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// Blocks that are on their way from peers.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct PeerFetch {
    fetch: Closable<pegaflow_peers::PeerFetch>,
    #[pyo3(get)]
    keys: usize,
}

#[pymethods]
impl PeerFetch {
    fn poll(&self) -> Option<usize> {
        self.fetch.opened().map_or(Some(0), |fetch| fetch.poll())
    }

    fn found(&self) -> usize {
        self.fetch.opened().map_or(0, |fetch| fetch.found())
    }

    fn close(&self, py: Python<'_>) -> Result<()> {
        py.engine(|| {
            self.fetch.close();
            std::result::Result::<(), NativeError>::Ok(())
        })
    }
}
