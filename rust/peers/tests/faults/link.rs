//! Cables that are pulled in the middle of a read: two hosts are network namespaces, the one of this process and that
//! of the server.

use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::common::{BLOCK_BYTES, ShmDir, check, connect_by_tcp, namespace};
use crate::hosts::{BLOCKS, POOL_BYTES, Worker, fetch_all, forget, nothing_is_left, request};
use crate::numbers::Numbers;
use crate::report::{INSIDE, Tally, in_lanes, keep};

/// So slow that a read takes a while: a kind of queue and its options.
const SLOW: &str = "tbf rate 400mbit burst 64kb latency 400ms";

fn run(command: &str) {
    let words: Vec<&str> = command.split(' ').collect();
    let done = Command::new(words[0]).args(&words[1..]).output().unwrap();
    assert!(done.status.success(), "{command}: {}", String::from_utf8_lossy(&done.stderr));
}

/// A namespace of one's own, in which one is root: to be written before a command.
fn alone() -> &'static [&'static str] {
    let id = Command::new("id").arg("-u").output().unwrap();
    if id.stdout == b"0\n" { &["unshare", "--net"] } else { &["unshare", "--user", "--map-root-user", "--net"] }
}

#[test]
fn a_link_that_goes_down_in_the_middle_of_a_read_costs_a_bounded_wait() {
    if std::env::var_os(INSIDE).is_some() {
        return pull_cables();
    }
    let here = std::env::current_exe().unwrap();
    let done = Command::new(alone()[0])
        .args(&alone()[1..])
        .arg(here)
        .args(["--exact", "--nocapture", "link::a_link_that_goes_down_in_the_middle_of_a_read_costs_a_bounded_wait"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
    // Its own totals are none of this run's.
    said.lines().filter(|line| line.starts_with('|')).for_each(|line| println!("{line}"));
    let rows: Vec<&str> = said.lines().filter(|line| line.starts_with('{')).collect();
    assert_eq!(rows.len(), 1, "{said}");
    keep(rows[0].to_owned());
}

/// A cable between this namespace and that of a server.
struct Cable {
    number: u64,
    server: Worker,
}

impl Cable {
    fn lay(number: u64, dir: &ShmDir) -> Self {
        let folder = dir.0.to_str().unwrap();
        let blocks = BLOCKS.to_string();
        let server = Worker::start_with(&["unshare", "--net"], &["await", folder, &Self::address(number, 2), &blocks]);
        let there = format!("nsenter --net=/proc/{}/ns/net", server.0.id());
        run(&format!("ip link add ours{number} type veth peer name theirs netns {}", server.0.id()));
        run(&format!("ip addr add 10.96.{number}.1/24 dev ours{number}"));
        run(&format!("{there} ip addr add 10.96.{number}.2/24 dev theirs"));
        run(&format!("{there} ip link set theirs up"));
        run(&format!("{there} tc qdisc add dev theirs root {SLOW}"));
        let cable = Self { number, server };
        cable.set("up");
        cable
    }

    fn address(number: u64, end: u64) -> String {
        format!("10.96.{number}.{end}:7441")
    }

    fn set(&self, state: &str) {
        run(&format!("ip link set ours{} {state}", self.number));
    }

    /// Bytes that came over it so far.
    fn received(&self) -> u64 {
        let table = std::fs::read_to_string("/proc/self/net/dev").unwrap();
        let name = format!("ours{}:", self.number);
        let line = table.lines().find_map(|line| line.trim().strip_prefix(&name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Pull it when it has brought so many bytes. When that was done.
    fn pull_at(&self, bytes: u64) -> Instant {
        let began = Instant::now();
        while self.received() < bytes && began.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_micros(500));
        }
        self.set("down");
        Instant::now()
    }
}

fn pull_cables() {
    let tally = Tally::new("link down in the middle of a read");
    let last = Mutex::new(0);
    in_lanes(8, |lane| {
        let number = {
            let mut last = last.lock().unwrap();
            *last += 1;
            *last
        };
        let dir = ShmDir::new("link");
        let cable = Cable::lay(number, &dir);
        let ours = dir.pool("ours", POOL_BYTES);
        let peers = connect_by_tcp(&ours, &[Cable::address(number, 2)]);
        let mut numbers = Numbers::new();
        for _ in lane {
            fetch_all(&peers, &ours);
            let at = cable.received() + 1 + numbers.below(BLOCKS * BLOCK_BYTES);
            let (found, ended, down) = std::thread::scope(|scope| {
                let puller = scope.spawn(|| cable.pull_at(at));
                let (found, _) = request(&peers, &ours);
                (found, Instant::now(), puller.join().unwrap())
            });
            tally.add(found, BLOCKS, ended.saturating_duration_since(down));
            cable.set("up");
            check(&ours, namespace(&ours), 0..BLOCKS);
            forget(&ours);
        }
        nothing_is_left(&ours);
        drop(cable.server);
    });
    tally.end();
}
