//! The networks of this host as a server and a client use them.

use std::net::TcpListener;
use std::sync::Arc;

use pegaflow_engine::Pool;

use crate::rdma::{Nic, RdmaServer, RdmaTransport};
use crate::tcp::{TcpServer, TcpTransport};
use crate::transport::{DataServer, DataStarter, LeasedParts, RegionSource, Transport};

/// Ways for the bytes of peers, the best first: RDMA by those of the ports that can be used, then TCP.
pub fn transports(pool: &Arc<Pool>, nics: &[Nic], pairs_per_peer: usize) -> Vec<Arc<dyn Transport>> {
    let mut transports: Vec<Arc<dyn Transport>> = Vec::with_capacity(2);
    if !nics.is_empty() {
        let rdma = RdmaTransport::open(Arc::clone(pool), nics, pairs_per_peer);
        transports.extend(rdma.map(|rdma| Arc::new(rdma) as Arc<dyn Transport>));
    }
    transports.push(Arc::new(TcpTransport::new(Arc::clone(pool) as _)));
    transports
}

/// The server's half of TCP.
pub fn data_starter() -> Arc<DataStarter> {
    Arc::new(|listener: TcpListener, parts: Arc<dyn LeasedParts>| {
        let server = TcpServer::start(listener, parts)?;
        Ok(Box::new(server) as Box<dyn DataServer>)
    })
}

/// The server's half of RDMA; `None` if none of the ports can be used.
pub fn regions(pool: &Arc<Pool>, nics: &[Nic]) -> Option<Arc<dyn RegionSource>> {
    let server = (!nics.is_empty()).then(|| RdmaServer::open(Arc::clone(pool), nics))??;
    Some(Arc::new(server))
}
