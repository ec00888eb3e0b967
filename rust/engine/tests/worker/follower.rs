//! A process that moves bytes for another one, as an engine's workers do for its scheduler. It lives on for a moment
//! when its leader is killed, and still reads and writes what it was told to.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, raise};
use pegaflow_engine::{BlockRef, ErrorKind, Key, Member};

use crate::blocks::{fill_parts, key, nonce_of};
use crate::plan::Plan;
use crate::random::{Random, mix};
use crate::resets::made_ns;
use crate::stopwatch::Stopwatch;

/// What a follower is told to do with the blocks of one namespace.
#[derive(Clone, Copy)]
pub enum Task {
    /// Write all parts, with this nonce.
    Write(u64),
    /// Read all parts; none was stored before this time.
    Read(u64),
}

/// The leader's end.
pub struct Follower {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Follower {
    /// Start a follower of `leader`; `None` if it did not get to join.
    pub fn start(dir: &Path, plan_seed: u64, leader: Member) -> Option<Self> {
        let numbers = [leader.row.to_string(), leader.epoch.to_string(), plan_seed.to_string()];
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg("follow")
            .arg(dir)
            .args(numbers)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut follower = Self { stdin: child.stdin.take(), stdout, child };
        follower.is_done().then_some(follower)
    }

    /// Have it do something. `false` if it died meanwhile.
    pub fn has_done(&mut self, task: Task, space: usize, blocks: &[BlockRef], keys: &[Key]) -> bool {
        let (name, number) = match task {
            Task::Write(nonce) => ("write", nonce),
            Task::Read(reset_ns) => ("read", reset_ns),
        };
        let mut line = format!("{name} {space} {number}");
        for (block, key) in blocks.iter().zip(keys) {
            let number = u64::from_le_bytes(key.to_bytes()[..8].try_into().unwrap());
            line += &format!(" {} {number}", block.0);
        }
        let told = self.stdin.as_mut().is_some_and(|stdin| writeln!(stdin, "{line}").is_ok());
        told && self.is_done()
    }

    /// Wait for its word.
    fn is_done(&mut self) -> bool {
        let mut word = String::new();
        self.stdout.read_line(&mut word).is_ok() && word == "done\n"
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let status = self.child.wait().unwrap();
        assert!(status.success() || status.signal() == Some(Signal::SIGKILL as i32), "a follower failed: {status}");
    }
}

/// The follower's end: do what is told until the leader closes the line, or is gone.
pub fn run(dir: &Path, leader: Member, plan: &Plan) {
    let pool = Stopwatch::start_threads(|| plan.open(dir));
    if let Err(error) = pool.join(leader) {
        return assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    }
    say_done();
    let random = &mut Random::new(mix(u64::from(std::process::id())));
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Vec<u64> = words[1..].iter().map(|word| word.parse().unwrap()).collect();
        let parts = plan.spaces[numbers[0] as usize].part_bytes.len();
        for pair in numbers[2..].chunks(2) {
            let (block, key) = (BlockRef(pair[0]), key(pair[1]));
            if random.chance(10) {
                std::thread::sleep(Duration::from_micros(random.below(1500)));
            }
            if random.below(10_000) < 3 {
                raise(Signal::SIGKILL).unwrap();
            }
            if words[0] == "write" {
                assert!(fill_parts(&pool, block, &key, numbers[1], parts), "a block is reserved while it is written");
            } else {
                let nonce = nonce_of(&pool, block, &key, parts).unwrap_or_else(|what| panic!("wrong bytes: {what}"));
                assert!(made_ns(nonce) >= numbers[1], "a block was reserved before a reset");
            }
        }
        say_done();
    }
}

/// The leader may be gone.
fn say_done() {
    let _nobody_listens = writeln!(std::io::stdout(), "done");
}
