// 2048: a game to play by arrows, touch or buttons, and to watch again from any move.

import { game2048 } from "./games.js";
import { button, change, clamp, frame, player, rect, slider, steering, text, thousands, within } from "./kit.js";

// move: pushes before the picture that is shown, without those that moved nothing
export const defaults = {
  seed: "8", // digits: a browser's numbers end at 2**53
  moves: "",
  move: 0, // the picture that is shown
  target: 2048,
  size: 4,
  interval_ms: 150, // between two pictures
};
export function legal(name, value) {
  if (name === "seed") return /^\d{1,30}$/.test(value);
  if (name === "moves") return /^[WASD]{0,20000}$/.test(value);
  if (name === "target") return within(Math.log2(value), [3, 17]);
  return within(value, { size: [2, 8], interval_ms: [10, 10_000] }[name] ?? [0, 20_000]);
}

const LETTERS = { ArrowUp: "W", ArrowLeft: "A", ArrowDown: "S", ArrowRight: "D" };
const NAMES = { W: "up", A: "left", S: "down", D: "right" };
const GOAL = 256;
// from yellow over red to violet: light enough under dark letters, dark enough under light ones
const TILES = (
  "#fbf6e9 #f9ecc4 #f7d98b #f4bf5f #ee9b45 #e27538 #cc5437 #b03a3f #8f2a4b #6c2257 #47195c"
).split(" ");
const colourOf = (tile) => TILES[Math.log2(tile) - 1] ?? "#1d0f3d";

export default {
  render({ model, el }) {
    let known = {}; // the game of the values, played on as they grow
    const values = () => Object.fromEntries(Object.keys(defaults).map((name) => [name, model.get(name)]));

    function gameOf({ moves, seed, target, size }) {
      const key = JSON.stringify([seed, target, size]);
      if (known.key !== key || !moves.startsWith(known.moves)) {
        known = { key, moves: "", game: game2048({ seed, target, size }), after: [0] };
      }
      for (const move of moves.slice(known.moves.length)) {
        known.game.push(move);
        known.after.push(known.game.states.length - 1); // pushes that moved something, after each
      }
      known.moves = moves;
      return known.game;
    }
    const place = (all) => Math.min(all.move, gameOf(all).states.length - 1);

    /** A push from the picture that is shown: what came after it is another game now. */
    function push(letter) {
      const all = values();
      const at = place(all);
      const kept = at === known.game.states.length - 1 ? all.moves : all.moves.slice(0, known.after.indexOf(at));
      if (at === known.game.states.length - 1 && known.game.end()) return false;
      const { states } = gameOf({ ...all, moves: kept + letter });
      if (states.length - 1 === at) return false; // it moved nothing
      change(model, { moves: kept + letter, move: at + 1 });
      return true;
    }
    const { pad, press, key } = steering((arrow) => push(LETTERS[arrow]));
    const corner = player("Let “down, left, right, up” play", () => [..."SADW"].some(push), 60);
    const watch = player("Watch it again", () => {
      const all = values();
      const last = gameOf(all).states.length - 1;
      change(model, { move: place(all) < last ? place(all) + 1 : 0 });
      return place(values()) < last;
    }, model.get("interval_ms"));

    function draw(all, width) {
      const { states } = gameOf(all);
      const { board, added } = states[place(all)];
      const gap = 8;
      const side = clamp(Math.floor((Math.min(width, 440) - gap) / all.size), 24, 108);
      const whole = gap + all.size * side;
      const tile = (number, r, c) => {
        const [x, y] = [gap + c * side, gap + r * side];
        const size = Math.floor(clamp((1.5 * (side - gap)) / String(number).length, 11, 32));
        const fresh = r === added[0] && c === added[1];
        return [
          rect(x, y, side - gap, side - gap, {
            rx: 5,
            class: `tile ${number ? "" : "none"} ${fresh ? "fresh" : ""}`,
            style: number ? `fill: ${colourOf(number)}` : null,
          }),
          number
            ? text(x + (side - gap) / 2, y + (side - gap) / 2 + 0.36 * size, number, {
                "text-anchor": "middle",
                style: `font-size: ${size}px; font-weight: 700; fill: ${number < 64 ? "#4a4036" : "#ffffff"}`,
              })
            : null,
        ];
      };
      const shapes = [
        rect(0, 0, whole, whole, { rx: 8, class: "tray" }),
        board.map((row, r) => row.map((number, c) => tile(number, r, c))),
      ];
      return { shapes, height: whole, caption: inWords(all) };
    }

    function inWords(all) {
      const { states, end } = gameOf(all);
      const at = place(all);
      const { score, move, board } = states[at];
      const best = Math.max(...board.flat());
      const told = at < states.length - 1 ? `; next: ${NAMES[move]}` : end() ? `; ${end()}` : "";
      return `Move ${at} of ${states.length - 1}, ${thousands(score)} points, largest tile ${best}${told}.`;
    }

    const history = slider(model, "move", { min: 0, max: 1 });
    const { follow } = history;
    history.follow = (all) => {
      history.input.max = Math.max(gameOf(all).states.length - 1, 1);
      follow({ ...all, move: place(all) });
    };
    const best = (all) => Math.max(...gameOf(all).states.flatMap(({ board }) => board.flat()));
    const view = frame(model, el, {
      name: "board",
      label: "A board of 2048",
      defaults,
      controls: [history],
      extra: [
        pad,
        watch.element,
        corner.element,
        button("New game", () => {
          corner.stop();
          change(model, { seed: String(1 + (Number(model.get("seed").slice(-8)) % 99_999)), moves: "", move: 0 });
        }),
      ],
      hint:
        "Arrow keys (the picture has to be focused), a swipe over the board, or the buttons push all " +
        "tiles. From an earlier move another game begins.",
      draw,
      press,
      key,
      page: "widgets/10_board",
      task: {
        words: `reach a tile of ${GOAL}; the strategy that pushes down, left, right, up is no good player.`,
        done: (all) => best(all) >= GOAL &&
          `${best(all)} is there. What did you know that the four pushes in a row do not?`,
      },
    });
    return () => {
      corner.stop();
      watch.stop();
      view.leave();
    };
  },
};
