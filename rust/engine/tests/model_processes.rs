//! Random operations of several processes on one pool against a `HashMap`. They die by kill -9, in the middle of an
//! operation at a named point or between two. `PEGAFLOW_TEST_SEED` repeats a run, `PEGAFLOW_TEST_STEPS` makes it
//! longer.
#![allow(missing_docs)]

mod common;
mod kill;
mod model_processes_parts;

use kill::random::seed;
use model_processes_parts::{Model, Shape};

const STEPS: u64 = 4_000;

fn run(test: &str, shape: Shape) -> Model {
    let steps = std::env::var("PEGAFLOW_TEST_STEPS").map_or(STEPS, |text| text.parse().expect("a number of steps"));
    let started = std::time::Instant::now();
    let mut model = Model::new(test, seed(test), shape);
    for step in 0..steps {
        model.step(step);
    }
    println!("{test}: {steps} steps in {:.0} s, {}", started.elapsed().as_secs_f32(), model.summary());
    model
}

#[test]
fn deaths_lose_nothing_that_was_stored_while_there_is_room() {
    let model = run("model of processes with room", Shape { chains: 4, length: 10, fits: true, spaces: 1 });
    assert!(model.deaths() > 10 && model.stored() > 100 && model.resets() > 2, "{}", model.summary());
    model.finish();
}

#[test]
fn deaths_under_pressure_leave_a_map_that_forgets() {
    let model = run("model of processes under pressure", Shape { chains: 40, length: 20, fits: false, spaces: 2 });
    assert!(model.deaths() > 10 && model.stored() > 1000 && model.resets() > 2, "{}", model.summary());
    model.finish();
}
