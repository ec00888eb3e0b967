//! A data plane without a network: parts are copied from the server's leases within the process. It fails on demand.

use std::collections::HashMap;
use std::net::{IpAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pegaflow_engine::checksum::part_checksum;
use pegaflow_engine::{Error, ErrorKind, Pool, Result};
use pegaflow_peers::proto::HelloReply;
use pegaflow_peers::transport::{
    Channel, ControlCalls, DataServer, DataStarter, LeasedParts, PartRead, ReadOutcome, Transport, TransportKind,
};

/// What goes wrong in reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// Of each read only the first part comes.
    FirstOnly,
    /// A byte is another one.
    WrongByte,
    /// Nobody knows what still writes.
    NotQuiet,
    /// The channel breaks before anything has come.
    Breaks,
    /// A defect of the transport.
    Panics,
    /// It takes so long.
    Slow,
    /// There is no way.
    NoWay,
}

#[derive(Default)]
struct State {
    served: HashMap<u32, Arc<dyn LeasedParts>>,
    faults: HashMap<u32, Fault>,
    reads: u64,
}

/// All servers of a test.
#[derive(Clone, Default)]
pub struct Net(Arc<Mutex<State>>);

struct Server(Net, u32);

impl DataServer for Server {
    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("reads", self.0.0.lock().unwrap().reads)]
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.0.lock().unwrap().served.remove(&self.1);
    }
}

impl Net {
    pub fn starter(&self) -> Arc<DataStarter> {
        let net = self.clone();
        Arc::new(move |listener: TcpListener, parts: Arc<dyn LeasedParts>| {
            let port = u32::from(listener.local_addr().unwrap().port());
            net.0.lock().unwrap().served.insert(port, parts);
            let server: Box<dyn DataServer> = Box::new(Server(net.clone(), port));
            Ok(server)
        })
    }

    pub fn transport(&self, pool: &Arc<Pool>) -> Arc<dyn Transport> {
        Arc::new(Fake { net: self.clone(), pool: Arc::clone(pool) })
    }

    /// What goes wrong with all that are served now.
    pub fn set_fault(&self, fault: Fault) {
        let mut state = self.0.lock().unwrap();
        let ports: Vec<u32> = state.served.keys().copied().collect();
        state.faults.extend(ports.into_iter().map(|port| (port, fault)));
    }

    pub fn reads(&self) -> u64 {
        self.0.lock().unwrap().reads
    }
}

struct Fake {
    net: Net,
    pool: Arc<Pool>,
}

struct FakeChannel {
    net: Net,
    pool: Arc<Pool>,
    port: u32,
}

impl Transport for Fake {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn open(
        &self,
        _host: IpAddr,
        hello: &HelloReply,
        _session: [u8; 16],
        _calls: Arc<dyn ControlCalls>,
        _deadline: Instant,
    ) -> Result<Box<dyn Channel>> {
        let port = hello.data_port;
        if self.net.0.lock().unwrap().faults.get(&port) == Some(&Fault::NoWay) {
            return Err(Error::new(ErrorKind::NotFound, "no way"));
        }
        Ok(Box::new(FakeChannel { net: self.net.clone(), pool: Arc::clone(&self.pool), port }))
    }
}

impl FakeChannel {
    fn read_one(&self, parts: &Arc<dyn LeasedParts>, read: &PartRead, fault: Fault) -> Option<u64> {
        let sending = parts.begin(&read.ticket, Box::new(|| {}))?;
        let mut bytes = sending.part(read.index, read.part)?.to_vec();
        assert_eq!(bytes.len() as u64, read.bytes);
        if fault == Fault::WrongByte {
            bytes[7] ^= 1;
        }
        super::write(&self.pool, read.target, read.part, &bytes).then(|| part_checksum(read.part, &bytes))
    }
}

impl Channel for FakeChannel {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn read(&mut self, parts: &[PartRead], _deadline: Instant) -> ReadOutcome {
        let (served, fault) = {
            let mut state = self.net.0.lock().unwrap();
            state.reads += 1;
            let fault = state.faults.get(&self.port).copied().unwrap_or_default();
            (state.served.get(&self.port).cloned(), fault)
        };
        let broken = |text: &str| Some(Error::new(ErrorKind::Device, text));
        let nothing = vec![None; parts.len()];
        let Some(served) = served.filter(|_| fault != Fault::Breaks) else {
            return ReadOutcome { arrived: nothing, quiet: true, broken: broken("the wire is cut") };
        };
        assert!(fault != Fault::Panics, "as wanted");
        if fault == Fault::Slow {
            std::thread::sleep(Duration::from_millis(300));
        }
        let count = if fault == Fault::FirstOnly { 1 } else { parts.len() };
        let mut arrived: Vec<Option<u64>> =
            parts.iter().take(count).map(|read| self.read_one(&served, read, fault)).collect();
        arrived.resize(parts.len(), None);
        if fault == Fault::NotQuiet {
            return ReadOutcome { arrived, quiet: false, broken: broken("the device does not answer") };
        }
        ReadOutcome { arrived, quiet: true, broken: None }
    }
}
