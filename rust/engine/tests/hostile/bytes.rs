//! Decisions taken from bytes, one after the other; when they are used up, all further ones are 0.

pub struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// At most `count` bytes.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, left) = self.0.split_at(count.min(self.0.len()));
        self.0 = left;
        taken
    }

    /// A number of `bytes` bytes, little endian.
    fn number(&mut self, bytes: usize) -> u64 {
        self.take(bytes).iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    pub fn byte(&mut self) -> u8 {
        self.number(1) as u8
    }

    pub fn word(&mut self) -> u64 {
        self.number(8)
    }

    /// A number from 0 to `count - 1`, of two bytes.
    pub fn below(&mut self, count: usize) -> usize {
        self.number(2) as usize % count.max(1)
    }

    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// True for one byte in `count`.
    pub fn one_in(&mut self, count: u8) -> bool {
        self.byte().is_multiple_of(count)
    }

    /// What may stand in a word that held `before`.
    pub fn damaged(&mut self, before: u64) -> u64 {
        match self.byte() % 9 {
            0 => 0,
            1 => u64::MAX,
            2 => self.word(),
            3 => before ^ 1 << (self.byte() % 64),
            4 => before.wrapping_add(1),
            5 => before.wrapping_sub(1),
            6 => self.number(2),
            7 => before << 32 | self.number(2),
            _ => before & 0xFFFF_FFFF | self.number(4) << 32,
        }
    }
}
