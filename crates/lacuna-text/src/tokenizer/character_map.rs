//! The map from characters to others that SentencePiece models bring along, where their normalization is none
//! of Unicode's own.
//!
//! ```text
//! u32      bytes of the trie
//! u32 ...  the trie, a double array: what its units hold is in `Unit`
//! bytes    replacements, each ended by a zero
//! ```
//!
//! Files are not trusted: a trie that points outside of itself finds nothing there.

use tokenizers::tokenizer::normalizer::NormalizedString;
use unicode_segmentation::UnicodeSegmentation;

use super::error::TokenizerError;

/// Characters, and sequences of a few, with what they become.
#[derive(Debug)]
pub(super) struct CharacterMap {
    trie: Vec<Unit>,
    replacements: String,
}

/// A node of the trie, or the value of one.
#[derive(Clone, Copy, Debug)]
struct Unit(u32);

impl Unit {
    /// The byte that leads here, and a bit that no byte has for a unit that is a value.
    fn label(self) -> u32 {
        self.0 & (1 << 31 | 0xFF)
    }

    fn has_value(self) -> bool {
        self.0 >> 8 & 1 == 1
    }

    fn value(self) -> usize {
        (self.0 & !(1 << 31)) as usize
    }

    /// What the number of a child is made of, with its byte.
    fn offset(self) -> usize {
        let shift = (self.0 & 1 << 9) >> 6;
        (self.0 >> 10 << shift) as usize
    }
}

/// Bytes of a grapheme from which on it is looked up character by character, as `tokenizers` does it.
const LONG_GRAPHEME: usize = 6;

impl CharacterMap {
    /// Reads a `precompiled_charsmap`.
    pub(super) fn new(bytes: &[u8]) -> Result<CharacterMap, TokenizerError> {
        let damaged = |detail: &str| TokenizerError::Part {
            part: "normalizer",
            detail: format!("its map of characters {detail}"),
        };
        let cut_off = || damaged("is cut off");
        let (size, rest) = bytes.split_first_chunk::<4>().ok_or_else(cut_off)?;
        let size = u32::from_le_bytes(*size) as usize;
        let (trie, replacements) = rest.split_at_checked(size).ok_or_else(cut_off)?;
        let units = trie.as_chunks::<4>().0.iter();
        let replacements = std::str::from_utf8(replacements);
        Ok(CharacterMap {
            trie: units.map(|unit| Unit(u32::from_le_bytes(*unit))).collect(),
            replacements: replacements.map_err(|_| damaged("is no text"))?.to_owned(),
        })
    }

    /// Replaces what is in the map, if the result keeps within `most` bytes; otherwise says how many it has
    /// come to.
    pub(super) fn apply(&self, text: &mut NormalizedString, most: usize) -> Result<(), usize> {
        let mut changes = Changes::default();
        for grapheme in text.get().graphemes(true) {
            let whole = (grapheme.len() < LONG_GRAPHEME).then(|| self.replacement(grapheme));
            if let Some(Some(other)) = whole {
                changes.replace(grapheme, other);
            } else {
                for character in grapheme.chars() {
                    let alone = character.encode_utf8(&mut [0; 4]).to_owned();
                    changes.replace(&alone, self.replacement(&alone).unwrap_or(&alone));
                }
            }
            if changes.bytes > most {
                return Err(changes.bytes);
            }
        }
        text.transform(changes.characters, changes.removed_first);
        Ok(())
    }

    /// What the shortest beginning of `text` in the map becomes. That it is the shortest, and stands for all
    /// of it, is how `tokenizers` reads these maps, and models are used with that.
    fn replacement(&self, text: &str) -> Option<&str> {
        let mut node = self.trie.first()?.offset();
        for byte in text.bytes().take_while(|byte| *byte != 0) {
            node ^= usize::from(byte);
            let unit = *self.trie.get(node)?;
            if unit.label() != u32::from(byte) {
                return None;
            }
            node ^= unit.offset();
            if unit.has_value() {
                let rest = self.replacements.get(self.trie.get(node)?.value()..)?;
                return rest.split('\0').next();
            }
        }
        None
    }
}

/// A text's characters, as the `tokenizers` crate is told of changes: of each, how many were put in (1) or how
/// many after it were left out (less than 0).
#[derive(Debug, Default)]
struct Changes {
    characters: Vec<(char, isize)>,
    removed_first: usize,
    bytes: usize,
}

impl Changes {
    fn replace(&mut self, old: &str, new: &str) {
        let removed = old.chars().count();
        let kept = removed.min(new.chars().count());
        let changes = new.chars().enumerate();
        let changes = changes.map(|(index, character)| (character, isize::from(index >= kept)));
        self.characters.extend(changes);
        self.bytes += new.len();
        match self.characters.last_mut() {
            Some((_, change)) if removed > kept => *change -= (removed - kept) as isize,
            Some(_) => {}
            None => self.removed_first += removed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map of `a` alone, to `replacement`: the root, `a` at its own number, its value beside it.
    fn map_of_a(replacement: &str) -> Vec<u8> {
        let mut units = [0u32; 256];
        units[usize::from(b'a')] = u32::from(b'a') | 1 << 8 | 1 << 10;
        units[usize::from(b'a') ^ 1] = 1 << 31;
        let mut bytes = 1024u32.to_le_bytes().to_vec();
        bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend(replacement.as_bytes());
        bytes.push(0);
        bytes
    }

    fn applied(map: &[u8], text: &str, most: usize) -> Result<String, usize> {
        let map = CharacterMap::new(map).expect("a map");
        let mut text = NormalizedString::from(text);
        map.apply(&mut text, most)?;
        Ok(text.get().to_owned())
    }

    #[test]
    fn characters_become_what_the_map_says() {
        assert_eq!(
            applied(&map_of_a("xy"), "banana", 100),
            Ok("bxynxynxy".to_owned())
        );
        assert_eq!(applied(&map_of_a(""), "abba", 100), Ok("bb".to_owned()));
        assert_eq!(applied(&map_of_a(""), "aa", 100), Ok(String::new()));
    }

    #[test]
    fn growth_is_bounded_while_it_happens() {
        let long = "x".repeat(1000);
        assert_eq!(applied(&map_of_a(&long), "aaaa", 1500), Err(2000));
    }

    #[test]
    fn damaged_maps_are_refused_or_find_nothing() {
        for cut in [0, 3, 100, 1027] {
            assert!(CharacterMap::new(&map_of_a("x")[..cut]).is_err(), "{cut}");
        }
        let mut text = map_of_a("x");
        text.push(0xFF);
        assert!(CharacterMap::new(&text).is_err());
        assert_eq!(applied(&[0; 4], "ab", 9), Ok("ab".to_owned()));
        // Values and children that lie outside.
        let outside = u32::from(b'a') | 1 << 8 | 300 << 10;
        for (index, unit) in [(97, u32::MAX), (97, outside), (96, u32::MAX), (0, outside)] {
            let mut bytes = map_of_a("x");
            bytes[4 + 4 * index..][..4].copy_from_slice(&unit.to_le_bytes());
            assert_eq!(applied(&bytes, "ab", 9), Ok("ab".to_owned()));
        }
    }
}
