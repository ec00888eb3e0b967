//! Servers of a test whose data plane is the [`super::fake`] one, and what goes wrong with each.

use std::collections::HashMap;
use std::net::TcpListener;
use std::sync::{Arc, Condvar, Mutex};

use pegaflow_engine::Pool;
use pegaflow_peers::transport::{DataServer, DataStarter, LeasedParts, Transport, TransportKind};

pub use super::fake::Fault;
use super::fake::{FakeTransport, Ghosts};

#[derive(Default)]
struct State {
    served: HashMap<u32, Arc<dyn LeasedParts>>,
    faults: HashMap<u32, Fault>,
    reads: u64,
}

/// All servers of a test.
#[derive(Clone, Default)]
pub struct Net {
    state: Arc<Mutex<State>>,
    changed: Arc<Condvar>,
    pub ghosts: Ghosts,
}

struct Server(Net, u32);

impl DataServer for Server {
    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("reads", self.0.reads())]
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.state.lock().unwrap().served.remove(&self.1);
    }
}

impl Net {
    pub fn starter(&self) -> Arc<DataStarter> {
        let net = self.clone();
        Arc::new(move |listener: TcpListener, parts: Arc<dyn LeasedParts>| {
            let port = u32::from(listener.local_addr().unwrap().port());
            net.state.lock().unwrap().served.insert(port, parts);
            let server: Box<dyn DataServer> = Box::new(Server(net.clone(), port));
            Ok(server)
        })
    }

    pub fn transport(&self, pool: &Arc<Pool>) -> Arc<dyn Transport> {
        self.transport_of(pool, TransportKind::Tcp)
    }

    /// One that passes for this kind.
    pub fn transport_of(&self, pool: &Arc<Pool>, kind: TransportKind) -> Arc<dyn Transport> {
        let (state, changed) = (Arc::clone(&self.state), Arc::clone(&self.changed));
        let source = move |port: u32, reads: bool| {
            let mut state = state.lock().unwrap();
            state.reads += u64::from(reads);
            let is_held = |state: &mut State| reads && state.faults.get(&port) == Some(&Fault::Held);
            let state = changed.wait_while(state, is_held).unwrap();
            let fault = state.faults.get(&port).copied().unwrap_or_default();
            (state.served.get(&port).cloned(), fault)
        };
        Arc::new(FakeTransport { kind, space: pool.space(), source: Arc::new(source), ghosts: self.ghosts.clone() })
    }

    /// What goes wrong with all that are served now.
    pub fn set_fault(&self, fault: Fault) {
        let mut state = self.state.lock().unwrap();
        let ports: Vec<u32> = state.served.keys().copied().collect();
        state.faults.extend(ports.into_iter().map(|port| (port, fault)));
        self.changed.notify_all();
    }

    /// What went wrong in one way goes wrong in another one from now on.
    pub fn turn(&self, from: Fault, to: Fault) {
        let mut state = self.state.lock().unwrap();
        state.faults.values_mut().filter(|fault| **fault == from).for_each(|fault| *fault = to);
    }

    pub fn reads(&self) -> u64 {
        self.state.lock().unwrap().reads
    }
}
