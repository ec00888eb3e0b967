//! Random lives of pools over the same disks: whatever is found has the bytes of its key as of the last reset, through
//! evictions, restarts, power cuts, slow and failing reads.

use super::Admission;
use super::fake_pool::{Life, key, keys};
use crate::Key;
use crate::ssd::fake_block::{Fixture, Random, cases, seed};
use crate::ssd::fake_disk::Faults;

const LIVES: u64 = 12;
const STEPS: u64 = 60;
const CHAINS: u64 = 12;

fn chain(random: &mut Random) -> Vec<Key> {
    let (number, length) = (random.below(CHAINS), 1 + random.below(10));
    // Pairs of chains begin with the same blocks.
    let common = number / 2 * 1000;
    [keys(common..common + 3), keys(number * 1000 + 500_000..number * 1000 + 500_000 + length)].concat()
}

fn faults(random: &mut Random) -> Faults {
    match random.below(4) {
        0 => Faults::default(),
        1 => Faults { late: 60, short: 20, ..Faults::default() },
        2 => Faults { read_error: 5, late: 30, ..Faults::default() },
        _ => Faults { late: 10, ..Faults::default() },
    }
}

fn live(fixture: &Fixture, random: &mut Random, nonce: &mut u64, others: &mut u64) {
    let admission = if random.chance(70) { Admission::All } else { Admission::SecondTouch };
    let life = Life::new(fixture, admission, 64);
    if random.chance(80) {
        life.until_serving();
    }
    for _ in 0..STEPS {
        let chain = chain(random);
        match random.below(100) {
            0..40 => drop(life.store(&chain, *nonce).to_string()),
            40..55 => {
                *others += 1;
                life.store(&[key(*others)], *nonce);
            }
            55..60 => fixture.disk.set(faults(random)),
            60..62 => {
                fixture.disk.set(Faults::default());
                life.until_serving();
                *nonce += 1;
                life.reset();
            }
            62..75 => {
                let abandoned = life.pool.prefetch(life.ns, &chain, None, random.chance(80)).unwrap();
                std::thread::sleep(std::time::Duration::from_micros(random.below(500)));
                drop(abandoned);
            }
            _ => {
                let found = life.fetch(&chain);
                assert!(found.unwrap_or(0) <= chain.len());
            }
        }
        life.check(&chain, |_, found| found == *nonce);
    }
    fixture.disk.set(Faults::default());
    life.assert_clean();
}

#[test]
fn whatever_is_found_has_the_bytes_of_its_key_as_of_the_last_reset() {
    let mut random = Random::new(seed("tier"));
    for _ in 0..cases(3) {
        let fixture = Fixture::new(1 + random.below(2) as usize, random.next());
        let (mut nonce, mut others) = (1, 1 << 40);
        for _ in 0..LIVES {
            live(&fixture, &mut random, &mut nonce, &mut others);
            if random.chance(50) {
                fixture.disk.crash();
            }
        }
    }
}
