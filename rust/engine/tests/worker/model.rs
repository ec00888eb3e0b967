//! One process of the model: does what the parent's lines say, and answers each with one line.

use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use pegaflow_engine::{BlockRef, Key, Namespace, Pool, crash_point};

use crate::blocks::{MAIN, fill, namespace, open, wrong_block};
use crate::chains::chain;
use crate::say;

struct Reserved {
    index: usize,
    block: BlockRef,
    key: Key,
    nonce: u64,
}

struct Process {
    pool: Arc<Pool>,
    leased: Vec<(BlockRef, Key, u64)>,
    reserved: Vec<Reserved>,
}

pub fn run(dir: &Path) {
    let mut process = Process { pool: open(dir), leased: Vec::new(), reserved: Vec::new() };
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        if words[0] == "reopen" {
            drop(process);
            process = Process { pool: open(dir), leased: Vec::new(), reserved: Vec::new() };
            say("done");
            continue;
        }
        let numbers: Vec<u64> = words[1..].iter().filter_map(|word| word.parse().ok()).collect();
        let answer = process.obey(words[0], words.get(1).copied().unwrap_or(""), &numbers);
        say(&format!("done{}", answer.iter().map(|number| format!(" {number}")).collect::<String>()));
    }
}

impl Process {
    fn obey(&mut self, what: &str, name: &str, numbers: &[u64]) -> Vec<u64> {
        let space = |pool: &Pool| namespace(pool, MAIN + numbers[0] as u8);
        let keys = || chain(numbers[1], numbers[2]);
        match what {
            "arm" => crash_point::arm(name, "kill").unwrap(),
            "look" => {
                let leased = self.lease(space(&self.pool), &keys());
                self.pool.release(&leased.iter().map(|(block, _, _)| *block).collect::<Vec<_>>()).unwrap();
                return leased.into_iter().map(|(_, _, nonce)| nonce).collect();
            }
            "hold" => {
                let leased = self.lease(space(&self.pool), &keys());
                let nonces = leased.iter().map(|(_, _, nonce)| *nonce).collect();
                self.leased.extend(leased);
                return nonces;
            }
            "let_go" => self.let_go(),
            "begin" => return self.reserve(space(&self.pool), &keys(), numbers[3]),
            "finish" => return self.publish(),
            "store" => {
                self.reserve(space(&self.pool), &keys(), numbers[3]);
                return self.publish();
            }
            "abandon" => {
                let blocks: Vec<BlockRef> = self.reserved.drain(..).map(|reserved| reserved.block).collect();
                self.pool.abort(&blocks).unwrap();
            }
            "touch" => drop(self.pool.touch(space(&self.pool), &keys()).unwrap()),
            "reset" => drop(self.pool.reset(space(&self.pool)).unwrap()),
            "rebuild" => drop(self.pool.rebuild_index()),
            "reap" => drop(self.pool.reap().unwrap()),
            "grow" => self.pool.grow_ahead(space(&self.pool)).unwrap(),
            other => panic!("no order {other}"),
        }
        Vec::new()
    }

    /// Lease what is there of a chain from its head on, and look at every byte.
    fn lease(&self, ns: Namespace, keys: &[Key]) -> Vec<(BlockRef, Key, u64)> {
        let leased = self.pool.lease(ns, keys, 0, keys.len()).unwrap();
        leased.into_iter().zip(keys).map(|(block, key)| (block, *key, self.nonce(block, key))).collect()
    }

    fn nonce(&self, block: BlockRef, key: &Key) -> u64 {
        if let Some(what) = wrong_block(&self.pool, block, key) {
            panic!("wrong bytes: {what}");
        }
        let source = self.pool.space().read_source(block, 0).unwrap();
        // SAFETY: leased by this process; address and length come from the pool.
        let bytes = unsafe { std::slice::from_raw_parts(source.address, 8) };
        u64::from_le_bytes(bytes.try_into().unwrap())
    }

    fn let_go(&mut self) {
        for (block, key, nonce) in std::mem::take(&mut self.leased) {
            assert_eq!(self.nonce(block, &key), nonce, "leased bytes became others");
            self.pool.release(&[block]).unwrap();
        }
    }

    /// Returns the indices of the keys that got a slot.
    fn reserve(&mut self, ns: Namespace, keys: &[Key], nonce: u64) -> Vec<u64> {
        let reserved = self.pool.reserve(ns, keys, None, true).unwrap();
        let indices = reserved.iter().map(|(index, _)| *index as u64).collect();
        self.reserved.extend(reserved.into_iter().map(|(index, block)| Reserved {
            index,
            block,
            key: keys[index],
            nonce,
        }));
        indices
    }

    /// Returns the indices of the keys that became visible.
    fn publish(&mut self) -> Vec<u64> {
        let mut visible = Vec::new();
        for Reserved { index, block, key, nonce } in std::mem::take(&mut self.reserved) {
            assert!(fill(&self.pool, block, &key, nonce), "a reserved block is there until it is published");
            if self.pool.publish(&[block]).unwrap() == 1 {
                visible.push(index as u64);
            }
        }
        visible
    }
}
