//! A process that writes records to an SSD cache as fast as it can, and says which of them are written.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use pegaflow_engine::ssd::{Event, Record, WriteStart};

use crate::records::{open_store, record_bytes, record_id};
use crate::{say, wait_for_parent};

pub fn run(dir: &Path, backend: &str, first: u64, count: u64) {
    let mut store = open_store(dir, backend);
    let mut numbers = HashMap::new();
    let mut next = first;
    while next < first + count || !numbers.is_empty() {
        if next < first + count {
            let bytes = record_bytes(next);
            match store.write(&Record { id: record_id(next), parts: &[&bytes], checksum: None }) {
                WriteStart::Queued(ticket) => {
                    numbers.insert(ticket, next);
                    next += 1;
                }
                WriteStart::Busy => {}
                other => panic!("{other:?}"),
            }
        } else {
            store.flush();
        }
        for event in store.poll(Duration::from_millis(1)) {
            let Event::Written(ticket) = event else { panic!("a record was lost") };
            say(&numbers.remove(&ticket).unwrap().to_string());
        }
    }
    say("done");
    wait_for_parent();
}
