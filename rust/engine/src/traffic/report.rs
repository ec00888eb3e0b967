//! The statistics in numbers, for those who look at a pool from outside.

use std::collections::BTreeMap;

use serde::Serialize;

use super::file::Traffic;
use super::pressure::PressureReport;
use crate::shm::clock::boot_ms;
use crate::shm::file::Place;
use crate::shm::process::Member;
use crate::sync::Relaxed;

/// Sizes of which the curve tells, in eighths of the pool's.
const EIGHTHS: [u64; 9] = [1, 2, 4, 6, 8, 12, 16, 32, 64];

#[derive(Serialize)]
pub(crate) struct TrafficReport {
    namespaces: Vec<BTreeMap<&'static str, u64>>,
    windows: Vec<WindowReport>,
    curve: CurveReport,
    pressure: PressureReport,
}

#[derive(Serialize)]
struct WindowReport {
    seconds: u64,
    asked: u64,
    distinct: u64,
    hit_ppm: Option<u64>,
}

#[derive(Serialize)]
struct CurveReport {
    references: u64,
    samples: u64,
    /// Millionths of the blocks that are followed.
    sampled_ppm: u64,
    skipped: u64,
    points: Vec<PointReport>,
}

#[derive(Serialize)]
struct PointReport {
    bytes: u64,
    hit_ppm: Option<u64>,
}

/// What is known of the pool in `place` of so many bytes, if it has statistics that this build can read. `namespaces`:
/// those there are; `alive`: processes that live.
pub(crate) fn report(place: &Place, pool_bytes: u64, namespaces: &[usize], alive: &[Member]) -> Option<TrafficReport> {
    let traffic = Traffic::open(place).ok()?;
    let header = traffic.header();
    let counts = |id: &usize| {
        let row = traffic.namespaces().get(*id)?;
        let mut counts: BTreeMap<&'static str, u64> = row.counts().collect();
        counts.insert("id", *id as u64);
        Some(counts)
    };
    let windows = traffic.windows(boot_ms() / 1000).map(|window| WindowReport {
        seconds: window.seconds,
        asked: window.asked,
        distinct: window.distinct,
        hit_ppm: window.hit_ppm(),
    });
    let curve = traffic.curve();
    let point = |eighths: u64| {
        let bytes = u128::from(pool_bytes) * u128::from(eighths) / 8;
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        PointReport { bytes, hit_ppm: curve.hit_ppm(bytes) }
    };
    Some(TrafficReport {
        namespaces: namespaces.iter().filter_map(counts).collect(),
        windows: windows.into(),
        curve: CurveReport {
            references: curve.references(),
            samples: header.samples.load(Relaxed),
            sampled_ppm: (traffic.threshold() as f64 / u64::MAX as f64 * 1e6) as u64,
            skipped: header.curve_skipped.load(Relaxed),
            points: EIGHTHS.map(point).into(),
        },
        pressure: traffic.pressure(alive),
    })
}
