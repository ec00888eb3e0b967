//! Processes that open and close pools all the time.

use std::path::Path;

use pegaflow_engine::{ErrorKind, Pool};

use crate::blocks::{MAIN, POOL_NAME, fill, key, namespace, options};
use crate::say;

/// Open the pool that each line names; say whether we created it, and our row.
pub fn race(dir: &Path) {
    let mut pools = Vec::new();
    for line in std::io::stdin().lines() {
        let pool = Pool::open(&line.unwrap(), &options(dir)).unwrap();
        let how = if pool.created() { "created" } else { "attached" };
        say(&format!("{how} {}", pool.member().unwrap().row));
        pools.push(pool);
    }
}

/// Open, use and leave a pool that somebody else keeps removing.
pub fn open_close(dir: &Path, rounds: u64) {
    for round in 0..rounds {
        match Pool::open(POOL_NAME, &options(dir)) {
            // Its files may be aside for a moment, so no block need fit; but nothing may fail.
            Ok(pool) => {
                let ns = namespace(&pool, MAIN);
                pool.grow_ahead(ns).unwrap();
                std::thread::sleep(std::time::Duration::from_micros(round % 7 * 200));
                let reserved = pool.reserve(ns, &[key(round)], None, true).unwrap();
                let filled = reserved.iter().all(|(_, block)| fill(&pool, *block, &key(round), round));
                let published = pool.publish(&reserved.iter().map(|(_, block)| *block).collect::<Vec<_>>()).unwrap();
                assert_eq!(published, if filled { reserved.len() } else { 0 });
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
        }
        std::thread::sleep(std::time::Duration::from_micros(round % 5 * 200));
    }
}
