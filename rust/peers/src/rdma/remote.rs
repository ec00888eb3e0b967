//! What a client knows of a server's segments.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pegaflow_engine::Result;

use crate::limits::RDMA_REGIONS_MAX;
use crate::proto::{Region, RegionsRequest};
use crate::transport::{ControlCalls, PartRead};

/// Segments of one server, as it has described them. Numbers of segments are not used twice, so nothing here grows
/// old.
pub(super) struct RemoteSegments {
    calls: Arc<dyn ControlCalls>,
    session: [u8; 16],
    term: u64,
    nics: usize,
    version: u64,
    known: BTreeMap<u32, Region>,
}

impl RemoteSegments {
    pub(super) fn new(calls: Arc<dyn ControlCalls>, session: [u8; 16], term: u64, nics: usize) -> Self {
        Self { calls, session, term, nics, version: 0, known: BTreeMap::new() }
    }

    /// Ask for the segments of `parts` that are not known yet. The server may not know some either.
    pub(super) fn learn(&mut self, parts: &[PartRead]) -> Result<()> {
        let numbers: BTreeSet<u32> = parts.iter().map(|read| read.segment).collect();
        let wanted: Vec<u32> = numbers.into_iter().filter(|number| !self.known.contains_key(number)).collect();
        for wanted in wanted.chunks(RDMA_REGIONS_MAX) {
            let reply = self.calls.regions(RegionsRequest {
                session: self.session.to_vec(),
                term: self.term,
                version: self.version,
                wanted: wanted.to_vec(),
            })?;
            self.version = reply.version;
            // Newer ones than it has told of come along.
            self.known.extend(reply.regions.into_iter().map(|region| (region.segment, region)));
        }
        Ok(())
    }

    /// Address and key of `bytes` at `offset` for the server's port `nic`; `None` if the segment is not known or
    /// shorter.
    pub(super) fn find(&self, read: &PartRead, nic: usize) -> Option<(u64, u32)> {
        let region = self.known.get(&read.segment)?;
        let inside = read.offset.checked_add(read.bytes)? <= region.bytes;
        let complete = region.rkeys.len() == self.nics;
        let address = region.address.checked_add(read.offset)?;
        (inside && complete).then(|| Some((address, *region.rkeys.get(nic)?))).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{ConnectReply, ConnectRequest, RegionsReply};
    use crate::transport::Ticket;
    use pegaflow_engine::{BlockRef, Error, ErrorKind};
    use std::sync::Mutex;

    /// Answers with these regions whatever is asked for, and keeps the questions.
    struct Answers(Vec<Region>, Mutex<Vec<Vec<u32>>>);

    impl ControlCalls for Answers {
        fn connect(&self, _request: ConnectRequest) -> Result<ConnectReply> {
            Err(Error::new(ErrorKind::Closed, "not in this test"))
        }

        fn give_up(&self, _request: ConnectRequest) {}

        fn regions(&self, request: RegionsRequest) -> Result<RegionsReply> {
            self.1.lock().unwrap().push(request.wanted);
            Ok(RegionsReply { version: 1, regions: self.0.clone(), digest: 0 })
        }
    }

    fn read(segment: u32, offset: u64, bytes: u64) -> PartRead {
        let ticket = Ticket { lease: 1, secret: [0; 16] };
        PartRead { ticket, index: 0, part: 0, segment, offset, bytes, target: BlockRef(0) }
    }

    fn region(segment: u32, address: u64, bytes: u64, rkeys: &[u32]) -> Region {
        Region { segment, address, bytes, rkeys: rkeys.to_vec() }
    }

    #[test]
    fn nothing_outside_of_a_segment_is_ever_asked_for() {
        let regions = vec![region(1, 0x1000, 100, &[7, 8]), region(2, u64::MAX - 10, u64::MAX, &[7, 8])];
        let mut remote = RemoteSegments::new(Arc::new(Answers(regions, Mutex::default())), [0; 16], 1, 2);
        remote.learn(&[read(1, 0, 1), read(2, 0, 1)]).unwrap();
        assert_eq!(remote.find(&read(1, 0, 100), 0), Some((0x1000, 7)));
        assert_eq!(remote.find(&read(1, 99, 1), 1), Some((0x1063, 8)));
        assert_eq!(remote.find(&read(1, 1, 100), 0), None);
        assert_eq!(remote.find(&read(1, u64::MAX, 2), 0), None);
        assert_eq!(remote.find(&read(2, 11, 1), 0), None);
        assert_eq!(remote.find(&read(3, 0, 1), 0), None);
    }

    #[test]
    fn only_what_is_not_known_is_asked_for() {
        let calls = Arc::new(Answers(vec![region(1, 0, 9, &[1]), region(5, 0, 9, &[1])], Mutex::default()));
        let mut remote = RemoteSegments::new(Arc::clone(&calls) as _, [0; 16], 1, 1);
        remote.learn(&[read(1, 0, 1), read(1, 3, 1), read(4, 0, 1)]).unwrap();
        remote.learn(&[read(1, 0, 1), read(4, 0, 1), read(5, 0, 1)]).unwrap();
        assert_eq!(*calls.1.lock().unwrap(), [vec![1, 4], vec![4]]);
        assert!(remote.find(&read(1, 0, 1), 0).is_some() && remote.find(&read(4, 0, 1), 0).is_none());
    }

    #[test]
    fn a_segment_without_a_key_for_every_port_is_not_used() {
        let mut remote =
            RemoteSegments::new(Arc::new(Answers(vec![region(1, 0, 9, &[1])], Mutex::default())), [0; 16], 1, 2);
        remote.learn(&[read(1, 0, 1)]).unwrap();
        assert_eq!(remote.find(&read(1, 0, 1), 0), None);
    }
}
