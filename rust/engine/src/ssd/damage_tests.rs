//! Flipped bits, swapped pieces and files cut short, anywhere: bytes that are served are right, and nothing ends the
//! process.
//!
//! `make ssd-crash CASES=n` runs this too; a failure names the seed, which `PEGAFLOW_TEST_SEED` repeats.

use super::fake_block::{Block, Fixture, Random, cases, seed};

/// One way to damage a file.
fn damage(bytes: &mut Vec<u8>, random: &mut Random, kind: u64) {
    let any = |random: &mut Random, bytes: &[u8]| random.below(bytes.len() as u64) as usize;
    match kind {
        0 => {
            for _ in 0..1 + random.below(64) {
                let at = any(random, bytes);
                bytes[at] ^= 1 << random.below(8);
            }
        }
        // The head of the file, where the superblocks are.
        1 => {
            let at = random.below(2 * 4096) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
        2 => {
            let (left, right) = (any(random, bytes) / 512 * 512, any(random, bytes) / 512 * 512);
            let most = left.abs_diff(right).min(bytes.len() - left.max(right)).min(8192);
            for at in 0..most {
                bytes.swap(left + at, right + at);
            }
        }
        // A zone where another was.
        3 => {
            let zone = |random: &mut Random| (64 << 10) + random.below(8) as usize * (32 << 10);
            let (from, to) = (zone(random), zone(random));
            bytes.copy_within(from..from + (32 << 10), to);
        }
        4 => {
            let at = any(random, bytes);
            let end = (at + any(random, bytes)).min(bytes.len());
            bytes[at..end].fill(random.next() as u8);
        }
        _ => {
            let length = any(random, bytes);
            bytes.truncate(length);
        }
    }
}

#[test]
fn damage_anywhere_serves_no_wrong_byte() {
    let mut random = Random::new(seed("ssd-damage"));
    let written: Vec<Block> = (0..40).map(Block::new).collect();
    let (mut whole, mut missing) = (0, 0);
    for case in 0..cases(240) {
        let fixture = Fixture::new(1 + random.below(2) as usize, random.next());
        let mut store = fixture.recovered();
        fixture.write_through(&mut store, &written);
        if random.chance(50) {
            store.close().unwrap();
        }
        let file = random.below(fixture.options.directories.len() as u64) as usize;
        fixture.disk.damage(file, |bytes, random| damage(bytes, random, case % 6));
        // Every read compares its bytes.
        let mut store = fixture.recovered();
        let found = fixture.count_whole(&mut store, &written);
        whole += found;
        missing += written.len() - found;
        // Damage is no end: the cache goes on.
        let more: Vec<Block> = (100..110).map(Block::new).collect();
        fixture.write_through(&mut store, &more);
        assert_eq!(fixture.count_whole(&mut store, &more), more.len());
    }
    println!("ssd-damage: {whole} whole, {missing} missing");
    assert!(whole > missing && missing > 0);
}

#[test]
fn files_that_were_swapped_serve_their_own_records() {
    let fixture = Fixture::new(2, 1);
    let written: Vec<Block> = (0..40).map(Block::new).collect();
    fixture.write_through(&mut fixture.recovered(), &written);
    let (left, right) = (fixture.disk.bytes(0), fixture.disk.bytes(1));
    fixture.disk.damage(0, |bytes, _| *bytes = right);
    fixture.disk.damage(1, |bytes, _| *bytes = left);
    assert_eq!(fixture.count_whole(&mut fixture.recovered(), &written), written.len());
}

#[test]
fn one_bad_superblock_is_mended_and_two_make_a_new_cache() {
    let fixture = Fixture::new(1, 2);
    let written: Vec<Block> = (0..20).map(Block::new).collect();
    fixture.write_through(&mut fixture.recovered(), &written);
    for bad in [0, 4096] {
        fixture.disk.damage(0, |bytes, _| bytes[bad + 100] ^= 1);
        assert_eq!(fixture.count_whole(&mut fixture.recovered(), &written), written.len());
    }
    fixture.disk.damage(0, |bytes, _| (bytes[100], bytes[4196]) = (!bytes[100], !bytes[4196]));
    assert_eq!(fixture.count_whole(&mut fixture.recovered(), &written), 0);
}
