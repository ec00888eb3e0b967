//! A check finds what is whole, names what is not, and changes nothing.

use super::check::{Checked, Nowhere};
use super::fake_block::{Block, Fixture};
use super::store::Store;

fn check(fixture: &Fixture) -> Checked {
    let mut store: Store<Nowhere> = fixture.open_read_only().unwrap();
    store.recover();
    store.check(&mut |_, _| true).unwrap()
}

fn written(disks: usize, seed: u64, count: u64) -> Fixture {
    let fixture = Fixture::new(disks, seed);
    let mut store = fixture.recovered();
    fixture.write_through(&mut store, &(0..count).map(Block::new).collect::<Vec<_>>());
    store.close().unwrap();
    fixture
}

#[test]
fn all_that_was_written_is_whole_and_counted_by_namespace() {
    let fixture = written(2, 1, 30);
    let checked = check(&fixture);
    assert_eq!((checked.damaged, checked.unreadable, checked.forgotten), (0, 0, 0), "{:?}", checked.problems);
    assert_eq!(checked.namespaces.values().map(|held| held.records).sum::<u64>(), 30);
    assert_eq!(checked.namespaces.len(), 6, "three fingerprints in two groups");
}

#[test]
fn a_check_leaves_every_byte_as_it_was() {
    let fixture = written(2, 2, 30);
    let before: Vec<Vec<u8>> = (0..2).map(|disk| fixture.disk.bytes(disk)).collect();
    check(&fixture);
    let after: Vec<Vec<u8>> = (0..2).map(|disk| fixture.disk.bytes(disk)).collect();
    assert!(before == after);
}

#[test]
fn forgotten_records_are_no_damage() {
    let fixture = written(1, 3, 30);
    let mut store = fixture.recovered();
    store.forget(&[0; 32]).unwrap();
    store.close().unwrap();
    let checked = check(&fixture);
    assert_eq!((checked.damaged, checked.forgotten), (0, 10));
    assert_eq!(checked.namespaces.len(), 4);
}

#[test]
fn a_flipped_bit_in_any_record_is_found() {
    let fixture = written(1, 4, 12);
    let length = fixture.disk.bytes(0).len();
    let mut found = 0;
    for at in ((64 << 10)..(96 << 10)).step_by(997).filter(|at| *at < length) {
        fixture.disk.damage(0, |bytes, _| bytes[at] ^= 1);
        let checked = check(&fixture);
        let whole: u64 = checked.namespaces.values().map(|held| held.records).sum();
        // The bit may lie in padding, in a record, or in the summary, in whose place the headers are followed.
        assert!(whole + checked.damaged <= 12 && checked.damaged == checked.problems.len() as u64);
        found += u64::from(whole < 12);
        fixture.disk.damage(0, |bytes, _| bytes[at] ^= 1);
    }
    assert!(found > 5, "{found}");
    assert_eq!(check(&fixture).damaged, 0);
}

#[test]
fn a_check_ends_when_it_is_told_to() {
    let fixture = written(1, 5, 20);
    let mut store: Store<Nowhere> = fixture.open_read_only().unwrap();
    store.recover();
    assert!(store.check(&mut |done, _| done == 0).is_none());
}
