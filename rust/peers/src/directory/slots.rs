//! Which of a cluster's hash slots a key is in.

/// Hash slots of a cluster.
pub(super) const SLOTS: usize = 16384;

/// Slot of a key. None of ours has braces, which would change what is hashed.
pub(super) fn slot_of(key: &[u8]) -> u16 {
    key.iter().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| crc << 1 ^ if crc & 0x8000 != 0 { 0x1021 } else { 0 })
    }) % SLOTS as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        // The check value of CRC-16/XMODEM is 0x31C3.
        assert_eq!(slot_of(b"123456789"), 0x31C3);
        assert_eq!(slot_of(b""), 0);
        assert_eq!(slot_of(b"foo"), 12182);
    }
}
