//! A file system too small for the pool, or filled by others while the pool grows: an error with a sentence, never a
//! SIGBUS, and nothing is lost. Each test mounts a tmpfs of 64 MiB in a mount namespace of its own.
#![allow(missing_docs)]

mod common;
mod kill;

use std::process::Command;

use common::ShmDir;

/// Run a role of the helper program where `dir` is a tmpfs of 64 MiB that no other process sees.
fn run_in_small_tmpfs(test: &str, role: &str) {
    let dir = ShmDir::new(test);
    let script = "mount -t tmpfs -o size=64m,mode=0755 small \"$1\" && exec \"$0\" full \"$1\" \"$2\"";
    // Root of a user namespace of its own may mount as well, where we are not root.
    let user = if nix::unistd::geteuid().is_root() { "--mount" } else { "--map-root-user" };
    let status = Command::new("unshare")
        .args(["--mount", user, "sh", "-c", script, env!("CARGO_BIN_EXE_pool-worker"), dir.0.to_str().unwrap(), role])
        .status()
        .unwrap();
    assert!(status.success(), "{role}: {status}");
}

#[test]
fn a_pool_larger_than_the_file_system_grows_as_far_as_it_can_and_evicts_then() {
    run_in_small_tmpfs("full-small", "pool-too-large");
}

#[test]
fn a_file_system_filled_by_others_stops_growth_until_there_is_room_again() {
    run_in_small_tmpfs("full-others", "filled-by-others");
}

#[test]
fn an_index_larger_than_the_file_system_is_refused_and_leaves_nothing_behind() {
    run_in_small_tmpfs("full-index", "index-too-large");
}

#[test]
fn a_pool_that_was_not_told_its_size_fits_the_file_system() {
    run_in_small_tmpfs("full-default", "default-size");
}

#[test]
fn a_completely_full_file_system_refuses_new_pools_and_serves_old_ones() {
    run_in_small_tmpfs("full-completely", "completely-full");
}

#[test]
fn a_namespace_without_a_segment_gets_one_of_another_where_the_file_system_is_full() {
    run_in_small_tmpfs("full-starving", "one-starves");
}
