//! Links: which segment begins after some groups with a certain one.
//!
//! A segment's name says what its *last* group hashes to, so a prompt that leaves it before its end cannot name it. Its
//! link is named by what its *first* group hashes to, which every prompt knows that goes on there, and says what all of
//! its groups do: so it is known how much of it a prompt shares before any of it comes, and where nothing begins, one
//! question is enough. Where several segments begin alike, the link is that of the last one that was put.
//!
//! ```text
//! lacuna link 1
//! <file name of the segment>
//! <what everything up to the end of its first group hashes to, as in names>
//! ... of each group
//! ```

use std::io::{self, Write};

use super::super::chain::Chain;
use super::super::index::{Segment, file_name};
use super::super::segment::Kind;

/// The first line.
const MAGIC: &str = "lacuna link 1";
/// No link is longer: a segment has 1,024 groups at most, of 33 bytes each.
const LONGEST: usize = 64 << 10;

/// What a link says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    /// The file of the segment.
    pub(super) target: String,
    /// Of each of its groups.
    chains: Vec<String>,
}

impl Link {
    /// The link to a segment of rows; `None` of others, which are found by their names.
    pub(super) fn to(segment: &Segment) -> Option<Self> {
        (segment.kind == Kind::Rows).then(|| Self {
            target: segment.name.clone(),
            chains: segment.chains.iter().map(|chain| chain.short()).collect(),
        })
    }

    /// What the link of segments is called that begin after so many groups with the group at whose end everything
    /// hashes to `first`.
    pub(super) fn name(first_group: usize, first: Chain) -> String {
        format!("{first_group:08x}-{}.link", first.short())
    }

    pub(super) fn encode(&self) -> String {
        format!("{MAGIC}\n{}\n{}\n", self.target, self.chains.join("\n"))
    }

    /// What was put as the link of a segment after `first_group` groups; `None` when it is none.
    pub(super) fn decode(bytes: &[u8], first_group: usize) -> Option<Self> {
        let mut lines = std::str::from_utf8(bytes).ok()?.lines();
        if lines.next()? != MAGIC {
            return None;
        }
        let target = lines.next()?.to_owned();
        let chains: Vec<String> = lines.map(str::to_owned).collect();
        let last = chains.last()?;
        let hex = |text: &String| {
            let digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            text.len() == 32 && text.bytes().all(digit)
        };
        let expected = file_name(Kind::Rows, first_group, chains.len(), last);
        (chains.iter().all(hex) && target == expected).then_some(Self { target, chains })
    }

    /// Groups of the segment.
    pub(super) fn groups(&self) -> usize {
        self.chains.len()
    }

    /// Of how many of them a prompt that goes on with `chains` begins.
    pub(super) fn common(&self, chains: &[Chain]) -> usize {
        let both = self.chains.iter().zip(chains);
        both.take_while(|(a, b)| **a == b.short()).count()
    }
}

/// Takes the bytes of a link, and no more than one may have.
#[derive(Debug, Default)]
pub(super) struct LinkBytes(pub(super) Vec<u8>);

impl Write for LinkBytes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LONGEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(first_group: usize, tokens: &[u32]) -> Segment {
        let mut chain = Chain([3; 32]);
        let before = chain;
        let chains: Vec<Chain> = tokens
            .iter()
            .map(|&token| {
                chain = chain.after(&[token]);
                chain
            })
            .collect();
        Segment {
            name: file_name(Kind::Rows, first_group, chains.len(), &chain.short()),
            kind: Kind::Rows,
            first_group,
            before,
            chains,
            payload_bytes: 0,
        }
    }

    #[test]
    fn links_say_how_much_of_a_segment_a_prompt_begins_with() {
        let (one, two) = (segment(7, &[1, 2, 3, 4]), segment(7, &[1, 2, 5]));
        let link = Link::to(&one).expect("of rows");
        assert_eq!(
            Link::decode(link.encode().as_bytes(), 7),
            Some(link.clone())
        );
        assert_eq!(link.common(&one.chains), 4);
        assert_eq!(link.common(&one.chains[..3]), 3);
        assert_eq!(link.common(&two.chains), 2);
        assert_eq!(link.common(&two.chains[1..]), 0);
        assert_eq!(Link::name(7, one.chains[0]), Link::name(7, two.chains[0]));
        let point = Segment {
            kind: Kind::ResumePoint,
            ..segment(7, &[1])
        };
        assert_eq!(Link::to(&point), None);
    }

    #[test]
    fn whichever_byte_of_a_link_differs_it_is_none_or_shares_less() {
        let segment = segment(7, &[1, 2, 3, 4]);
        let link = Link::to(&segment).expect("of rows");
        let whole = link.encode().into_bytes();
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                if let Some(found) = Link::decode(&bytes, 7) {
                    let same = found == link;
                    assert!(same || found.common(&segment.chains) < 4, "byte {at}");
                }
            }
            assert!(at + 1 == whole.len() || Link::decode(&whole[..at], 7).is_none());
        }
        assert_eq!(Link::decode(&whole, 8), None, "of another place");
        let mut bytes = LinkBytes::default();
        assert!(bytes.write_all(&vec![b'a'; LONGEST]).is_ok());
        assert!(bytes.write_all(b"a").is_err());
    }
}
