// Two games that Python plays too, number for number: 2048, and Pac-Man's maze of the first lesson.

import { range, twister } from "./arithmetic.js";

/** The numbers of Python's `random.Random(seed)`: from 0 up to 1, and one of a list. */
export function dice(seed) {
  const key = [];
  for (let rest = BigInt(seed); rest || !key.length; rest >>= 32n) key.push(Number(rest & 0xffffffffn));
  const state = new Uint32Array(624);
  state[0] = 19650218;
  const mixed = (i) => state[i - 1] ^ (state[i - 1] >>> 30);
  for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, mixed(i)) + i;
  let i = 1;
  const next = () => {
    if (++i < 624) return;
    state[0] = state[623];
    i = 1;
  };
  for (let k = 0; k < Math.max(624, key.length); k++, next()) {
    const j = k % key.length;
    state[i] = (state[i] ^ Math.imul(mixed(i), 1664525)) + key[j] + j;
  }
  for (let k = 0; k < 623; k++, next()) state[i] = (state[i] ^ Math.imul(mixed(i), 1566083941)) - i;
  state[0] = 0x80000000;
  const bits = twister(state);
  const random = () => ((bits() >>> 5) * 67108864 + (bits() >>> 6)) / 9007199254740992;
  function choice(list) {
    const size = 32 - Math.clz32(list.length);
    let at = list.length;
    while (at >= list.length) at = bits() >>> (32 - size);
    return list[at];
  }
  return { random, choice };
}

// ---------------------------------------------------------------- 2048

/** A row of tiles pushed to its left, and the points. */
function slide(row) {
  const tiles = row.filter(Boolean);
  const merged = [];
  let points = 0;
  while (tiles.length) {
    let tile = tiles.shift();
    if (tiles[0] === tile) points += tile += tiles.shift();
    merged.push(tile);
  }
  return [row.map((_, i) => merged[i] ?? 0), points];
}

const turned = (board) => board[0].map((_, c) => board.map((row) => row[c]));
const equal = (one, other) => one.every((row, r) => row.every((tile, c) => tile === other[r][c]));

/** All tiles pushed: W up, A left, S down, D right. */
export function pushed(board, move) {
  const [lines, back] = ["W", "S"].includes(move) ? [turned(board), turned] : [board, (b) => b];
  const flip = (line) => (["S", "D"].includes(move) ? [...line].reverse() : line);
  const results = lines.map((line) => slide(flip(line)));
  return {
    board: back(results.map(([line]) => flip(line))),
    points: results.reduce((sum, [, points]) => sum + points, 0),
  };
}

/** A game of 2048: the boards that it went through, from the seed and the moves. */
export function game2048({ seed, target, size }) {
  const { random } = dice(seed);
  const states = [];
  function add(board, score) {
    const empty = board.flatMap((row, r) => row.flatMap((tile, c) => (tile ? [] : [[r, c]])));
    const [r, c] = empty[Math.floor(random() * empty.length)];
    const tile = random() < 0.9 ? 2 : 4;
    const next = board.map((row, i) => row.map((old, j) => (i === r && j === c ? tile : old)));
    return { board: next, score, added: [r, c], move: null };
  }
  const empty = range(size).map(() => Array(size).fill(0));
  states.push(add(add(empty, 0).board, 0));
  const best = () => Math.max(...states.at(-1).board.flat());
  /** One push; whether anything moved. */
  function push(move) {
    const last = states.at(-1);
    const { board, points } = pushed(last.board, move);
    if (equal(board, last.board)) return false;
    last.move = move;
    states.push(add(board, last.score + points));
    return true;
  }
  const stuck = () => [..."WASD"].every((m) => equal(pushed(states.at(-1).board, m).board, states.at(-1).board));
  return { states, push, end: () => (best() >= target ? "won" : stuck() ? "lost" : "") };
}

// ---------------------------------------------------------------- Pac-Man

export const MAZE = ["#########", "#P..#...#", "#.#...#.#", "#...#..G#", "#########"];
export const STEPS = { u: [-1, 0], d: [1, 0], l: [0, -1], r: [0, 1] };

const placesOf = (mark) =>
  MAZE.flatMap((line, r) => [...line].flatMap((square, c) => (square === mark ? [[r, c]] : [])));
const same = ([a, b], [c, d]) => a === c && b === d;
function walk([r, c], step) {
  const [down, right] = STEPS[step];
  return MAZE[r + down][c + right] === "#" ? [r, c] : [r + down, c + right];
}

/** The states of a game, from its start to the last of the moves that counts. */
export function pacmanGame(moves, seed) {
  const { choice } = dice(seed);
  const [pacman, ghost] = [placesOf("P")[0], placesOf("G")[0]];
  const states = [{ pacman, ghost, beans: placesOf("."), over: false, reward: 0, points: 0 }];
  for (const move of moves) {
    const last = states.at(-1);
    if (last.over) break;
    const next = { pacman: walk(last.pacman, move), ghost: walk(last.ghost, choice(Object.keys(STEPS))) };
    next.caught = same(next.pacman, next.ghost) ||
      (same(next.pacman, last.ghost) && same(next.ghost, last.pacman));
    next.beans = last.beans.filter((bean) => !same(bean, next.pacman));
    const eaten = last.beans.length - next.beans.length;
    next.reward = next.caught ? -10 : next.beans.length ? eaten : 10;
    next.over = next.caught || !next.beans.length;
    next.points = last.points + next.reward;
    states.push({ ...next, move });
  }
  return states;
}
