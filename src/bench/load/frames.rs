//! The messages of a stream, out of the pieces in which they come.

use prost::bytes::{Buf as _, Bytes, BytesMut};

/// A flag and a length stand before each message.
const PREFIX: usize = 5;

/// Takes pieces and gives whole messages.
#[derive(Debug, Default)]
pub(super) struct Frames {
    left: BytesMut,
}

impl Frames {
    /// Takes one piece; `each` hears of every message that is now whole.
    pub(super) fn push(&mut self, piece: Bytes, mut each: impl FnMut(Bytes)) {
        // Most pieces hold whole messages, and nothing has to be copied.
        let mut piece = if self.left.is_empty() {
            piece
        } else {
            self.left.extend_from_slice(&piece);
            self.left.split().freeze()
        };
        while let Some(length) = piece.get(1..PREFIX) {
            let length = length.iter().fold(0, |sum, byte| (sum << 8) | usize::from(*byte));
            if piece.len() < PREFIX + length {
                break;
            }
            piece.advance(PREFIX);
            each(piece.split_to(length));
        }
        self.left.extend_from_slice(&piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_whole_however_they_come() {
        let sent: &[u8] = &[0, 0, 0, 0, 2, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 9];
        for size in 1..=sent.len() {
            let (mut frames, mut found) = (Frames::default(), Vec::new());
            for piece in sent.chunks(size) {
                frames.push(Bytes::copy_from_slice(piece), |message| found.push(message.to_vec()));
            }
            assert_eq!(found, [vec![7, 8], vec![], vec![9]], "{size} at a time");
        }
    }
}
