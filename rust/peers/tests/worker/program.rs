//! Helper program of the fault tests: one process of a pool that serves or fetches until it is killed.
//! `peer-worker serve DIR ADDRESS BLOCKS` or `peer-worker fetch DIR ADDRESS BLOCKS`.

#[path = "../common/mod.rs"]
mod common;

use std::time::Duration;

use common::{ShmDir, check, connect_by_tcp, fetch, keys, namespace, serve_by_tcp, store, until};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (role, address, blocks) = (args[0].as_str(), args[2].as_str(), args[3].parse::<u64>().unwrap());
    // Whoever started this removes it.
    let dir = std::mem::ManuallyDrop::new(ShmDir(args[1].clone().into()));
    match role {
        "serve" => {
            let pool = dir.pool("theirs", 32 << 20);
            store(&pool, namespace(&pool), 0..blocks);
            let server = serve_by_tcp(&pool, address);
            until(|| server.facts().address);
            println!("serving");
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
