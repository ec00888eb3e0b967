//! Helper program of the fault tests: one process of a pool that serves or fetches until it is killed.
//! `peer-worker serve DIR ADDRESS BLOCKS`, `peer-worker await DIR ADDRESS BLOCKS` (the same, once there is such an
//! address), `peer-worker fetch DIR ADDRESS BLOCKS` or `peer-worker late DIR KEY BLOCKS` (gives up a read that goes
//! on).

#[path = "../common/mod.rs"]
mod common;

use std::time::Duration;

use common::net::{Fault, Net};
use common::{
    ShmDir, check, connect, connect_by_tcp, counter, fetch, keys, namespace, serve, serve_by_tcp, store, until,
};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (role, address, blocks) = (args[0].as_str(), args[2].as_str(), args[3].parse::<u64>().unwrap());
    // Whoever started this removes it.
    let dir = std::mem::ManuallyDrop::new(ShmDir(args[1].clone().into()));
    match role {
        "serve" | "await" => {
            let pool = dir.pool("theirs", 32 << 20);
            store(&pool, namespace(&pool), 0..blocks);
            let server = serve_by_tcp(&pool, address);
            if role == "serve" {
                until(|| server.facts().address);
            }
            println!("serving");
            std::thread::sleep(Duration::from_secs(3600));
        }
        "late" => {
            let (net, first) = (Net::default(), address.parse::<u64>().unwrap());
            let (theirs, ours) = (dir.pool(&format!("theirs-{first}"), 4 << 20), dir.pool("ours", 4 << 20));
            store(&theirs, namespace(&theirs), first..first + blocks);
            let (_server, address) = serve(&theirs, &net);
            let peers = connect(&ours, &net, &[address]);
            net.set_fault(Fault::Late);
            // A call may be late, and then nothing is read.
            until(|| {
                assert_eq!(fetch(&peers, namespace(&ours), &keys(first..first + blocks)).1, 0);
                (counter(&peers, "slots_quarantined") == blocks).then_some(())
            });
            println!("writing");
            std::thread::sleep(Duration::from_secs(3600));
        }
        "fetch" => {
            let pool = dir.pool("ours", 32 << 20);
            let peers = connect_by_tcp(&pool, &[address.to_owned()]);
            let ns = namespace(&pool);
            println!("fetching");
            loop {
                let (_fetch, _found) = fetch(&peers, ns, &keys(0..blocks));
                check(&pool, ns, 0..blocks);
                pool.reset(ns).unwrap();
            }
        }
        other => panic!("no role {other}"),
    }
}
