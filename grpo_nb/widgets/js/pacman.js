// Pac-Man in the small maze of the first lesson: arrows, touch or buttons.

import { MAZE, STEPS, pacmanGame } from "./games.js";
import { button, change, clamp, frame, node, plural, rect, signed, steering } from "./kit.js";

export const defaults = {
  moves: "", // of the letters u, d, l and r
  seed: 7, // of the ghost's dice
};
export const legal = (name, value) =>
  name === "seed" ? value >= 0 && value < 2 ** 32 && value % 1 === 0 : /^[udlr]{0,500}$/.test(value);

const NAMES = { u: "up", d: "down", l: "left", r: "right" };
const [WIDE, HIGH] = [MAZE[0].length, MAZE.length];
const walls = MAZE.flatMap((line, r) => [...line].flatMap((mark, c) => (mark === "#" ? [[r, c]] : [])));

function inWords(states) {
  const { over, points, beans, caught } = states.at(-1);
  const end = caught ? ", and the ghost has you: game over" : over ? ", and no bean is left: won" : "";
  return `${plural(states.length - 1, "move")}, ${points} points, ${plural(beans.length, "bean")} left${end}.`;
}

export default {
  render({ model, el }) {
    const now = () => pacmanGame(model.get("moves"), model.get("seed"));
    function go(arrow) {
      if (!now().at(-1).over) change(model, { moves: model.get("moves") + arrow[5].toLowerCase() });
    }
    const { pad, press, key } = steering(go);

    function draw(values, width) {
      const states = now();
      const { pacman, ghost, beans, move = "r" } = states.at(-1);
      const side = clamp(Math.floor(width / WIDE), 28, 56);
      const at = ([r, c]) => [(c + 0.5) * side, (r + 0.5) * side];
      const [x, y] = at(pacman);
      const [gx, gy] = at(ghost);
      const [down, right] = STEPS[move];
      const [R, g] = [0.42 * side, 0.36 * side];
      const lip = (sign) => {
        const angle = Math.atan2(down, right) + sign * 0.6;
        return `${x + R * Math.cos(angle)},${y + R * Math.sin(angle)}`;
      };
      const shapes = [
        walls.map(([r, c]) => rect(c * side, r * side, side, side, { class: "maze" })),
        beans.map(at).map(([cx, cy]) => node("svg:circle", { cx, cy, r: side / 9, class: "bean" })),
        node("svg:path", {
          d: `M${gx - g},${gy + g} v${-g} a${g},${g} 0 0 1 ${2 * g},0 v${g} l${-g / 2},${-g / 3} ` +
            `l${-g / 2},${g / 3} l${-g / 2},${-g / 3} z`,
          class: "ghost",
        }),
        [-1, 1].map((eye) => node("svg:circle", { cx: gx + eye * 0.4 * g, cy: gy - 0.1 * g, r: g / 5, class: "eye" })),
        node("svg:path", { d: `M${x},${y} L${lip(1)} A${R},${R} 0 1 1 ${lip(-1)} Z`, class: "pacman" }),
      ];
      return { shapes, height: HIGH * side, caption: inWords(states) };
    }

    const view = frame(model, el, {
      name: "pacman",
      label: "A maze with Pac-Man, beans and a ghost",
      defaults,
      controls: [],
      extra: [
        pad,
        button("Take a move back", () => change(model, { moves: model.get("moves").slice(0, -1) })),
        button("Start over", () => change(model, { moves: "" })),
      ],
      hint:
        "Arrow keys (the picture has to be focused), a swipe over the maze, or the buttons. The ghost " +
        "rolls dice, the same ones for the same game.",
      draw,
      press,
      key,
      detail: () => {
        const { move, reward } = now().at(-1);
        return move ? `The last move, ${NAMES[move]}, earned ${signed(reward, 0)}.` : null;
      },
      page: "lessons/01_what_rl_is",
      task: {
        words: "eat every bean; nobody tells you the best move.",
        done: () => {
          const { over, caught, points } = now().at(-1);
          return over && !caught && `${points} points. Which of your moves was the good one?`;
        },
      },
    });
    return view.leave;
  },
};
