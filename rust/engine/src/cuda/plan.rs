//! Which bytes go where: jobs cut into pieces, pieces into copies. Knows no driver.

use crate::copy::KvLayout;

use super::driver::CopyOp;
use super::kernel_params::LAUNCH_BLOCKS_MAX;
use super::options::PACKED_ALIGNMENT;

/// Blocks of a job, and the bytes of each of them, that move together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Index of the first block in the job.
    pub(super) first: usize,
    /// Number of blocks.
    pub(super) count: usize,
    /// First byte of each block.
    pub(super) from: usize,
    /// End of the bytes of each block.
    pub(super) to: usize,
}

/// Cuts a job into pieces that fit a ring buffer: as many blocks as fit, else parts of one. A job in stages moves the
/// first bytes of all blocks before the next bytes of any.
#[derive(Debug)]
pub(super) struct Cutter {
    blocks: usize,
    /// Where each stage ends within a block; the last is the block's end.
    stage_ends: Vec<usize>,
    piece_bytes: usize,
    stage: usize,
    next: usize,
    from: usize,
}

/// Distance of packed blocks in a ring buffer. Blocks whose slots are neighbours are neighbours there too.
pub(super) fn packed_stride(block_bytes: usize) -> usize {
    block_bytes.next_multiple_of(PACKED_ALIGNMENT)
}

impl Cutter {
    /// `stage_ends`: ascending ends of the stages within a block, the last of them the block's end.
    pub(super) fn new(blocks: usize, stage_ends: Vec<usize>, piece_bytes: usize) -> Self {
        let stage = if blocks == 0 { stage_ends.len() } else { 0 };
        Self { blocks, stage_ends, piece_bytes, stage, next: 0, from: 0 }
    }

    /// Whether there is another piece.
    pub(super) fn has_more(&self) -> bool {
        self.stage < self.stage_ends.len()
    }

    /// Stages that were cut to their end.
    pub(super) fn stages_cut(&self) -> usize {
        self.stage
    }

    /// The next piece.
    pub(super) fn cut(&mut self) -> Option<Cut> {
        let stage_end = *self.stage_ends.get(self.stage)?;
        let stage_begin = if self.stage == 0 { 0 } else { self.stage_ends[self.stage - 1] };
        let (first, from) = (self.next, self.from.max(stage_begin));
        let fitting = (self.piece_bytes / packed_stride(stage_end - stage_begin)).min(LAUNCH_BLOCKS_MAX);
        let (count, to) = if fitting > 0 {
            (fitting.min(self.blocks - first), stage_end)
        } else {
            (1, stage_end.min(from + self.piece_bytes))
        };
        self.from = to;
        if to == stage_end {
            (self.next, self.from) = (first + count, 0);
        }
        if self.next == self.blocks {
            (self.stage, self.next) = (self.stage + 1, 0);
        }
        Some(Cut { first, count, from, to })
    }

    /// Cut no more; the blocks that were not moved whole.
    pub(super) fn stop(&mut self) -> std::ops::Range<usize> {
        let rest = match self.stage_ends.len() - self.stage {
            0 => self.blocks..self.blocks,
            1 => self.next..self.blocks,
            _ => 0..self.blocks,
        };
        self.stage = self.stage_ends.len();
        rest
    }
}

/// One block of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PieceBlock {
    /// Index in the job.
    pub(super) index: usize,
    /// Number in the KV cache.
    pub(super) id: u32,
    /// Address of its slot.
    pub(super) slot: usize,
}

/// A piece whose slots were found.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) blocks: Vec<PieceBlock>,
    pub(super) from: usize,
    pub(super) to: usize,
    /// Whether its blocks are complete with it.
    pub(super) last: bool,
    /// Stages of its job that are complete with it.
    pub(super) stages: usize,
    /// Distance of its packed blocks.
    pub(super) stride: usize,
}

impl Piece {
    /// Bytes moved.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.len() * (self.to - self.from)
    }

    /// Copies between the slots and packed form at `ring`.
    pub(super) fn packed_copies(&self, ring: u64) -> Vec<CopyOp> {
        let mut copies = Vec::new();
        for (position, block) in self.blocks.iter().enumerate() {
            let device = ring + (position * self.stride) as u64;
            push(&mut copies, CopyOp { host: block.slot + self.from, device, bytes: self.to - self.from });
        }
        copies
    }

    /// Copies between the slots and the fragments.
    pub(super) fn direct_copies(&self, layout: &KvLayout) -> Vec<CopyOp> {
        let mut copies = Vec::new();
        for block in &self.blocks {
            let mut offset = 0;
            for region in layout.regions() {
                let (begin, end) = (offset.max(self.from), (offset + region.length_bytes).min(self.to));
                if begin < end {
                    let fragment = region.address + block.id as usize * region.stride_bytes;
                    let device = (fragment + begin - offset) as u64;
                    push(&mut copies, CopyOp { host: block.slot + begin, device, bytes: end - begin });
                }
                offset += region.length_bytes;
            }
        }
        copies
    }
}

/// Add a copy, or make the last one longer if this one continues it on both sides.
fn push(copies: &mut Vec<CopyOp>, next: CopyOp) {
    match copies.last_mut() {
        Some(last) if last.host + last.bytes == next.host && last.device + last.bytes as u64 == next.device => {
            last.bytes += next.bytes;
        }
        _ => copies.push(next),
    }
}

/// Cut a copy where `length_at(host, bytes)` says that the run that begins at `host` ends.
pub(super) fn cut_copy(copy: CopyOp, mut length_at: impl FnMut(usize, usize) -> usize, mut each: impl FnMut(CopyOp)) {
    let mut done = 0;
    while done < copy.bytes {
        let (host, left) = (copy.host + done, copy.bytes - done);
        let bytes = length_at(host, left).clamp(1, left);
        each(CopyOp { host, device: copy.device + done as u64, bytes });
        done += bytes;
    }
}

/// Copies in at most `parts` groups of about as many bytes each.
pub(super) fn share_out(copies: &[CopyOp], parts: usize) -> Vec<&[CopyOp]> {
    let share = copies.iter().map(|copy| copy.bytes).sum::<usize>().div_ceil(parts).max(1);
    let (mut groups, mut start, mut bytes) = (Vec::new(), 0, 0);
    for (index, copy) in copies.iter().enumerate() {
        bytes += copy.bytes;
        if bytes >= share || index + 1 == copies.len() {
            groups.push(&copies[start..=index]);
            (start, bytes) = (index + 1, 0);
        }
    }
    groups
}

/// Largest power of two, at most 16, that divides `value`.
pub(super) fn alignment_of(value: usize) -> usize {
    1 << value.trailing_zeros().min(4)
}

/// Bytes that one access of a kernel may move: what it knows of 16, 8, 4 and 1.
pub(super) fn access_bytes(alignment: usize) -> u32 {
    match alignment {
        16.. => 16,
        8.. => 8,
        4.. => 4,
        _ => 1,
    }
}

/// Average length of the runs of a block.
pub(super) fn run_bytes(layout: &KvLayout) -> usize {
    layout.block_bytes() / layout.regions().len().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::Region;

    fn cuts(blocks: usize, block_bytes: usize, piece_bytes: usize) -> Vec<(usize, usize, usize, usize)> {
        staged_cuts(blocks, &[block_bytes], piece_bytes)
    }

    fn staged_cuts(blocks: usize, stage_ends: &[usize], piece_bytes: usize) -> Vec<(usize, usize, usize, usize)> {
        let mut cutter = Cutter::new(blocks, stage_ends.to_vec(), piece_bytes);
        std::iter::from_fn(|| cutter.cut()).map(|cut| (cut.first, cut.count, cut.from, cut.to)).collect()
    }

    #[test]
    fn whole_blocks_share_a_piece() {
        assert_eq!(cuts(5, 4096, 8192), [(0, 2, 0, 4096), (2, 2, 0, 4096), (4, 1, 0, 4096)]);
        assert_eq!(cuts(0, 4096, 8192), []);
    }

    #[test]
    fn a_launch_takes_no_more_blocks_than_it_can_name() {
        let all = cuts(500, 64, 1 << 20);
        assert_eq!(all.iter().map(|cut| cut.1).collect::<Vec<_>>(), [240, 240, 20]);
    }

    #[test]
    fn large_blocks_are_cut() {
        let expected = [(0, 1, 0, 8192), (0, 1, 8192, 10_000), (1, 1, 0, 8192), (1, 1, 8192, 10_000)];
        assert_eq!(cuts(2, 10_000, 8192), expected);
    }

    #[test]
    fn odd_blocks_are_spaced_so_that_accesses_stay_aligned() {
        assert_eq!(packed_stride(100), 128);
        assert_eq!(cuts(3, 100, 256), [(0, 2, 0, 100), (2, 1, 0, 100)]);
    }

    #[test]
    fn a_stopped_cutter_says_what_is_left() {
        let mut cutter = Cutter::new(5, vec![4096], 8192);
        cutter.cut();
        assert_eq!(cutter.stop(), 2..5);
        assert!(cutter.cut().is_none());
        assert!(cutter.stop().is_empty());
    }

    #[test]
    fn stages_come_one_after_the_other() {
        let expected = [(0, 2, 0, 100), (2, 1, 0, 100), (0, 2, 100, 200), (2, 1, 100, 200)];
        assert_eq!(staged_cuts(3, &[100, 200], 256), expected);
        let large =
            [(0, 1, 0, 256), (1, 1, 0, 256), (0, 1, 256, 512), (0, 1, 512, 600), (1, 1, 256, 512), (1, 1, 512, 600)];
        assert_eq!(staged_cuts(2, &[256, 600], 256), large);
        assert_eq!(staged_cuts(0, &[100, 200], 256), []);
    }

    #[test]
    fn a_stage_is_cut_with_its_last_piece() {
        let mut cutter = Cutter::new(3, vec![100, 200], 256);
        let mut stages = vec![cutter.stages_cut()];
        while cutter.cut().is_some() {
            stages.push(cutter.stages_cut());
        }
        assert_eq!(stages, [0, 0, 1, 1, 2]);
    }

    #[test]
    fn no_block_is_whole_before_the_last_stage() {
        let mut cutter = Cutter::new(3, vec![100, 200], 256);
        cutter.cut();
        assert_eq!(cutter.stop(), 0..3);
        let mut cutter = Cutter::new(3, vec![100, 200], 256);
        (0..3).for_each(|_| _ = cutter.cut());
        assert_eq!(cutter.stop(), 2..3);
    }

    fn piece(slots: &[usize], from: usize, to: usize) -> Piece {
        let block = |(index, &slot)| PieceBlock { index, id: index as u32, slot };
        Piece { blocks: slots.iter().enumerate().map(block).collect(), from, to, last: true, stages: 1, stride: 4096 }
    }

    #[test]
    fn neighbouring_slots_are_copied_at_once() {
        let copies = piece(&[8192, 12288, 65536], 0, 4096).packed_copies(1 << 30);
        let expected = [
            CopyOp { host: 8192, device: 1 << 30, bytes: 8192 },
            CopyOp { host: 65536, device: (1 << 30) + 8192, bytes: 4096 },
        ];
        assert_eq!(copies, expected);
    }

    #[test]
    fn direct_copies_follow_the_regions_and_their_clip() {
        let region = |address| Region { address, stride_bytes: 100, length_bytes: 60 };
        // SAFETY: the layout is never used in a job.
        let layout = unsafe { KvLayout::new(&[region(1000), region(5000)], 4) }.unwrap();
        let copies = piece(&[8000, 9000], 50, 70).direct_copies(&layout);
        let expected = [
            CopyOp { host: 8050, device: 1050, bytes: 10 },
            CopyOp { host: 8060, device: 5000, bytes: 10 },
            CopyOp { host: 9050, device: 1150, bytes: 10 },
            CopyOp { host: 9060, device: 5100, bytes: 10 },
        ];
        assert_eq!(copies, expected);
    }

    #[test]
    fn copies_are_cut_at_borders() {
        let mut all = Vec::new();
        let copy = CopyOp { host: 900, device: 50, bytes: 300 };
        cut_copy(copy, |host, _| 1000 - host % 1000, |piece| all.push(piece));
        assert_eq!(all, [CopyOp { host: 900, device: 50, bytes: 100 }, CopyOp { host: 1000, device: 150, bytes: 200 }]);
    }

    #[test]
    fn copies_are_shared_out_evenly() {
        let copies: Vec<CopyOp> = (0..10).map(|host| CopyOp { host, device: 0, bytes: 100 }).collect();
        let lengths = |parts| share_out(&copies, parts).into_iter().map(<[CopyOp]>::len).collect::<Vec<_>>();
        assert_eq!((lengths(1), lengths(2), lengths(3)), (vec![10], vec![5, 5], vec![4, 4, 2]));
        assert_eq!(share_out(&copies[..1], 4).len(), 1);
        assert!(share_out(&[], 4).is_empty());
    }

    #[test]
    fn accesses_are_as_wide_as_the_alignment_allows() {
        assert_eq!([0, 16, 32, 8, 24, 4, 2, 1, 3].map(alignment_of), [16, 16, 16, 8, 8, 4, 2, 1, 1]);
        assert_eq!([16, 8, 4, 2, 1].map(access_bytes), [16, 8, 4, 1, 1]);
    }
}
